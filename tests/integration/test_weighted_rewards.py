"""Rounds that are scored by a sum of rewards."""

from __future__ import annotations

import pytest

from tests.integration.online import lines, rounds, run_online

FUNCTIONS = "tests.unit.rollouts.reward_functions"


def test_a_run_trains_by_the_sum_and_logs_its_parts(tmp_path):
    parts = f"{{adder:{{weight:1}},short:{{reward:function,weight:-0.05,path:{FUNCTIONS}.lengths}}}}"
    run = run_online(
        tmp_path, "r", "online=true", "loss=dpo", "reward=weighted", f"reward.weighted.parts={parts}"
    )
    for folder in rounds(run):
        means = folder.record["metrics"]
        assert means["reward"] == pytest.approx(means["reward_adder"] - 0.05 * means["reward_short"])
    assert any("round_reward_short" in line for line in lines(run))
