"""What is said of rounds and runs that teach nothing."""

from __future__ import annotations

import re

import pytest

from jobs.without_signal import without_signal
from reports.outcome import outcome, told
from tests.tiny import make_config

FOUND = {"lowest_reward": 0.0, "highest_reward": 1.0, "zero_variance": 0.5, "keep_rate": 0.5}


@pytest.mark.parametrize(
    ("feedback", "metrics", "said"),
    [
        ("pair", {}, None),
        ("pair", {"keep_rate": 0.0}, r"rewards that differ by rounds\.tau=0\.01; all lie in \[0, 1\], so"),
        (
            "pair",
            {"zero_variance": 1.0, "keep_rate": 0.0},
            r"that differ; all lie in \[0, 1\], so there is noth",
        ),
        ("pair", {"lowest_reward": None, "highest_reward": None, "keep_rate": 0.0}, "no sample has a reward"),
        ("threshold", {"zero_variance": 1.0}, None),
        ("threshold", {"lowest_reward": 1.0 - 1e-9}, "every sample has the reward 1, so"),
        ("pair", {"zero_variance": None}, None),  # a round of an earlier version
    ],
)
def test_a_round_without_a_signal_is_told_with_its_rewards_and_what_to_change(feedback, metrics, said):
    config = make_config("online=true", "loss=kto", f"rounds.feedback={feedback}")
    found = without_signal(3, FOUND | metrics, config)
    assert (found is None) == (said is None)
    if found is not None:
        assert found.startswith("warning: round 3: ") and "sampler.temperature (0.7 now)" in found
        assert re.search(said, found)


@pytest.mark.parametrize(
    ("steps", "skipped", "silent", "early", "said"),
    [
        (4, 0, 0, False, None),
        (4, 0, 0, True, "stopped early"),
        (4, 3, 0, False, "3 of 4 updates skipped, as their gradients were not finite"),
        (
            4,
            3,
            1,
            True,
            "nothing learnt: 3 of 4 updates skipped, as their gradients were not finite; 1 of 4 upd",
        ),
    ],
)
def test_an_ending_says_what_every_update_came_to(steps, skipped, silent, early, said):
    found = told({"steps": steps} | outcome(steps, skipped, silent, early))
    assert found is None if said is None else found is not None and found.startswith(said)
