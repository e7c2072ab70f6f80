"""What an axis of a crossed sweep changes: known where values are made of known parts, of whole cells alone,
and tested over seeds."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy import stats

from launch import results
from launch.effects import Crossing
from launch.grid import read_sweep
from reports.statistics import holm
from tests.unit.launch.test_results import finish

AXES = {"cells": ("fresh", "stale"), "humanline": ("plain", "hl"), "shape": ("ppo", "dual", "cispo")}
SEEDS = (1, 2, 5)


def crossing(value) -> Crossing:
    points = itertools.product(*AXES.values())
    return Crossing(AXES, {at: {seed: value(at, seed) for seed in SEEDS} for at in points})


def test_an_effect_is_the_mean_over_all_that_else_differs():
    draw = np.random.default_rng(3).normal
    found = {(at, seed): draw() for at in itertools.product(*AXES.values()) for seed in SEEDS}
    effects = {c.b: c for c in crossing(lambda at, seed: found[at, seed]).effects()}
    assert list(effects) == ["stale", "hl", "dual", "cispo"]
    others = list(itertools.product(AXES["cells"], AXES["shape"]))
    by_hand = [
        np.mean([found[(c, "hl", s), i] - found[(c, "plain", s), i] for c, s in others]) for i in SEEDS
    ]
    assert effects["hl"].a == "plain (6)"
    assert effects["hl"].difference.value == pytest.approx(np.mean(by_hand), abs=1e-12)
    assert effects["hl"].difference.n == len(SEEDS), "seeds are counted, not pairs"
    assert effects["hl"].p_t == pytest.approx(stats.ttest_1samp(by_hand, 0).pvalue)
    assert [c.p_t_holm for c in effects.values()] == holm([c.p_t for c in effects.values()])


SWEEP = """
name: crossed
base: {loss: dpo}
cells:
  near: {lr: 1e-5}
  far: {lr: 1e-3}
grid:
  humanline: [false, true]
seeds: [1, 2]
"""


def test_from_the_command_line(tmp_path, capsys, monkeypatch):
    (tmp_path / "crossed.yaml").write_text(SWEEP)
    words = [str(tmp_path / "crossed.yaml"), "--out", str(tmp_path / "out"), "--effects"]
    runs = tmp_path / "runs"
    sweep = read_sweep(tmp_path / "crossed.yaml", {"runs_dir": str(runs)})
    monkeypatch.setattr(results, "read_sweep", lambda path: sweep)
    for i, run in enumerate(sweep.runs()):
        far, hl = run.cell.startswith("crossed-far"), run.settings["humanline"]
        value = 0.5 + 0.2 * hl - 0.1 * far + (0.01 if run.seed == 2 and hl else 0.0)
        finish(runs, run.name, None if i == 7 else value, *run.overrides())
    assert results.main(words) == 0
    said = capsys.readouterr().out
    assert "near: " not in said and "humanline − no_humanline (1)" in said, "far's runs are not all finished"
    assert "| humanline | no_humanline | 0.45 (2) |" in said
    finish(runs / "again", "x", 0.1, "loss=dpo")  # elsewhere: no part of it
    page = (tmp_path / "out" / "index.html").read_text()
    assert "Means of the axes" in page and "<svg" in page
    assert results.main([*words, "--within", "cells"]) == 0
    assert "near: humanline − no_humanline (1)" in capsys.readouterr().out
    for wrong, why in (
        ([*words, "--within", "shape"], "is no axis"),
        ([*words, "--baseline", "crossed-near-humanline"], "leave --effects out"),
        ([str(runs), "--effects"], "is of a sweep file"),
        ([words[0], "--within", "cells"], "give both"),
    ):
        assert results.main(wrong) == 2
        assert why in capsys.readouterr().err
