"""Arms compared with what is tried held equal: known where scores are made of a known effect and a known path
along the KL."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest

from common.errors import ConfigError
from launch import results
from launch.frontier import Frontier, Point, power_rows, seeds_needed
from launch.grid import read_sweep
from reports.statistics import Comparison, SeedMean, paired_power
from tests.unit.launch.test_results import finish

RATES, BETAS, SEEDS = ("lr1", "lr2", "lr4"), ("beta1", "beta2"), (1, 2, 5)


def frontier(score, kl) -> Frontier:
    """Arms ``plain`` and ``hl``; ``score`` and ``kl`` of (arm, setting, seed)."""
    arms = {
        arm: {
            s: Point(
                {seed: score(arm, s, seed) for seed in SEEDS},
                {seed: kl(arm, s, seed) for seed in SEEDS},
                dict.fromkeys(SEEDS, 12.0),
            )
            for s in itertools.product(RATES, BETAS)
        }
        for arm in ("plain", "hl")
    }
    return Frontier({"lr": RATES, "loss.beta": BETAS}, arms)


def rate(s) -> int:
    return int(s[0].removeprefix("lr"))


def test_an_arm_that_only_goes_further_is_better_at_one_setting_and_not_at_equal_kl():
    """Both arms lie on one curve of score over KL; ``hl`` goes twice as far at each rate."""
    far = {"plain": 1.0, "hl": 2.0}
    of = frontier(lambda a, s, i: far[a] * rate(s) + 10 * i, lambda a, s, i: far[a] * rate(s))
    found = {c.b.partition(":")[0].split()[0]: c.difference.value for c in of.contrasts()}
    assert of.common[0] == "lr4" and found["common"] == pytest.approx(4.0)
    assert found["each"] == pytest.approx(4.0), "the grid ends before plain has gone as far"
    assert found["equal"] == pytest.approx(0.0, abs=1e-12)
    assert of.edges(of.best("plain")) == ["lr", "loss.beta"], "which the table says"


def test_an_arm_that_is_better_at_every_distance_is_so_at_equal_kl():
    rng = np.random.default_rng(0)
    noise = {key: rng.normal(0, 1e-3) for key in itertools.product(("plain", "hl"), RATES, BETAS, SEEDS)}
    of = frontier(
        lambda a, s, i: 0.5 * (a == "hl") - (rate(s) - 2) ** 2 + noise[(a, *s, i)], lambda a, s, i: rate(s)
    )
    found = {c.b.split()[0]: c for c in of.contrasts()}
    assert found["equal"].difference.value == pytest.approx(0.5, abs=0.01) and found["equal"].significant
    assert of.best("hl")[0] == "lr2" and "lr" not in of.edges(of.best("hl"))


def test_the_seeds_that_a_power_needs_are_the_fewest_that_have_it():
    n = int(seeds_needed(0.05, 0.066, 0.05 / 12))
    assert paired_power(0.05, 0.066, n, 0.05 / 12) >= 0.8 > paired_power(0.05, 0.066, n - 1, 0.05 / 12)
    table = power_rows([Comparison("a", "b", SeedMean(0.0, 0.02, 10), 0.5, 0.5)], 0.05, 43)
    assert table[1][1] == "0.0632" and float(table[1][3]) < 0.3 and table[-1][-1] == table[1][-1]
    assert seeds_needed(1e-9, 1.0, 0.05).startswith("more than")


def test_a_sweep_of_arms_from_its_file(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    path, arms = tmp_path / "arms.yaml", "cells: {plain: {}, hl: {humanline: true}}\n"
    base = f"base: {{loss: dpo, runs_dir: {tmp_path}/runs}}\ngrid: {{lr: [1.0e-5, 2.0e-5, 4.0e-5]}}\n"
    path.write_text(f"{base}{arms}seeds: [1, 2]\n")
    for run in read_sweep(path).runs():
        lr, hl = run.settings["lr"], run.settings.get("humanline", False)
        noise = 1e-3 * run.seed * (1 + hl)
        folder = finish(tmp_path / "runs", run.name, 0.1 * hl + 1e4 * lr + noise, *run.overrides())
        summary = json.loads((folder / "summary.json").read_text())
        summary["after"]["eval_kl_initial"] = 1e4 * lr
        (folder / "summary.json").write_text(json.dumps(summary))
    assert results.main([str(path), "--frontier", "--power", "0.05", "--tests", "12"]) == 0
    said = capsys.readouterr().out
    assert "| plain | 3 |" in said and "equal KL: hl − plain | 0.1" in said
    assert "Power for a difference of 0.05" in said
    for words in (["--frontier", "--baseline", "arms-plain-lr1e-05"], ["--tests", "3"]):
        assert results.main([str(path), *words]) == 2
    path.write_text(f"{base}seeds: [1]\n")
    with pytest.raises(ConfigError, match="arms"):
        Frontier.of(read_sweep(path), [], "eval_loss")
