"""Which contexts of earlier rounds come again."""

from __future__ import annotations

from collections import Counter

from rollouts.rounds import replayed
from tests.tiny import make_config

EARLIER = [["a", "b", "c"], [], ["a", "d"]]


def test_contexts_are_drawn_without_replacement_from_their_own_round():
    for index in range(20):
        again = replayed(EARLIER, 3, index, seed=7)
        assert sum(map(len, again)) == 3
        assert all(set(chosen) <= set(own) for chosen, own in zip(again, EARLIER, strict=True))
        assert all(len(set(chosen)) == len(chosen) for chosen in again)
    assert replayed(EARLIER, 9, 1, seed=7) == EARLIER


def test_the_choice_is_a_function_of_seed_and_round_and_favours_nobody():
    assert replayed(EARLIER, 2, 4, seed=7) == replayed(EARLIER, 2, 4, seed=7)
    draws = Counter(
        (r, prompt)
        for seed in range(600)
        for r, chosen in enumerate(replayed(EARLIER, 2, 3, seed))
        for prompt in chosen
    )
    assert len(draws) == 5 and all(180 < count < 300 for count in draws.values())


def test_a_round_samples_what_it_does_not_replay():
    config = make_config(
        "online=true", "rounds.contexts=48", "rounds.contexts_per_round=12", "rounds.replay=0.4"
    )
    rounds = config.rounds
    assert [(rounds.sampled(i), rounds.replayed(i)) for i in range(3)] == [(12, 0), (7, 5), (7, 5)]
    assert rounds.most_contexts == 48 + 6 * 5
    assert make_config("online=true").rounds.most_contexts == make_config("online=true").rounds.contexts
