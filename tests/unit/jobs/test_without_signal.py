"""What is said of rounds and runs that teach nothing."""

from __future__ import annotations

import re

import pytest

from jobs.checks import without_signal
from reports.outcome import outcome, symptoms, text_of
from reports.report import final_table
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
    ("steps", "skipped", "silent", "why", "said"),
    [
        (4, 0, 0, None, None),
        (4, 0, 0, "it was enough", "stopped early: it was enough"),
        (4, 3, 0, None, "3 of 4 updates skipped, as their gradients were not finite"),
        (
            4,
            3,
            1,
            "it was enough",
            "nothing learnt: 3 of 4 updates skipped, as their gradients were not finite; 1 of 4 upd",
        ),
    ],
)
def test_an_ending_says_what_every_update_came_to(steps, skipped, silent, why, said):
    summary = {"steps": steps} | outcome(steps, skipped, silent, why)
    found = text_of(summary)
    assert bool(symptoms(summary)) == bool(skipped or silent)
    assert found is None if said is None else found is not None and found.startswith(said)


@pytest.mark.parametrize(
    ("grown", "kl", "said"),
    [
        (9.4, 0.9, None),
        (12.0, 0.5, "answers grew by 12 tokens"),
        (0.0, 1.26, "the KL divergence from the start is 1.26 nats a token"),
    ],
)
def test_a_run_that_has_gone_far_from_its_start_says_so(grown, kl, said):
    before, after = (
        {"eval_length_sampled": 20.0},
        {"eval_length_sampled": 20.0 + grown, "eval_kl_initial": kl},
    )
    summary = {"before": before, "after": after} | outcome(8, 0, 0, None)
    assert text_of(summary) == said
    assert said is None or said in final_table(summary)
