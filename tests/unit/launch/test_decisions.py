"""The tests that a sweep file plans: refused where they mean nothing, decided against scipy, shown to the
end alone."""

from __future__ import annotations

import csv
import math

import numpy as np
import pytest
import yaml  # type: ignore[import-untyped]
from scipy import stats

from common.errors import ConfigError
from launch import results
from launch.grid import read_sweep
from reports.statistics import equivalence_power
from tests.unit.launch.test_results import METRIC, failed, finish

HELPS = {"name": "helps", "cells": ["plain", "hl"], "metric": METRIC, "effect": 0.02}
SAME = {"cells": ["online", "hl"], "metric": METRIC, "effect": 0.05, "kind": "same"}
CELLS = {"plain": {"lr": 1e-5}, "hl": {"lr": 1e-4}, "online": {"lr": 1e-3}}
SCORES = {
    "plain": [0.50, 0.52, 0.49, 0.55, 0.51],
    "hl": [0.58, 0.57, 0.60, 0.54, 0.61],
    "online": [0.57, 0.58, 0.59, 0.55, 0.60],
}


def written(tmp_path, tests, **parts):
    sweep = {"base": {"runs_dir": str(tmp_path / "runs")}, "cells": CELLS, "seeds": 5, "tests": tests} | parts
    (tmp_path / "s.yaml").write_text(yaml.safe_dump(sweep, sort_keys=False))
    return tmp_path / "s.yaml"


def trained(path, without=()):
    for run in read_sweep(path).runs():
        if run.name not in without:
            value = SCORES[run.cell.removeprefix("s-").split("-")[0]][run.seed - 1]
            finish(path.parent / "runs", run.name, value, *run.overrides())


def test_a_test_that_means_nothing_is_refused_with_the_file(tmp_path):
    for change, said in [
        ({"cells": ["plain", "trained"]}, "helps: cells=trained: is no cell of the sweep: plain, hl, online"),
        ({"cells": ["hl"]}, r"tests\[1\].cells=\['hl'\]: must be two cells"),
        ({"metric": "accuracy"}, r"tests\[1\].metric=accuracy: must be a number of a finished run"),
        ({"cells": ["plain", []]}, r"tests\[1\].cells=\['plain', \[\]\]: must be two cells"),
        ({"kind": "equal"}, r"tests\[1\].kind=equal: use one of different, same"),
        ({"margin": 1}, r"tests\[1\].margin=1: .* cells, effect, kind, metric, name"),
        ({"effect": 0}, r"tests\[1\].effect=0.0: must be the smallest difference"),
        ({"name": "hl − online"}, r"tests\[1\].name=hl − online: must be a text that no other test has"),
    ]:
        with pytest.raises(ConfigError, match=said):
            read_sweep(written(tmp_path, [SAME, HELPS | change]))
    with pytest.raises(ConfigError, match=r"seeds=\[3\]: must be two or more"):
        read_sweep(written(tmp_path, [SAME, HELPS], seeds=[3]))


def test_decisions_are_scipys_with_holm(tmp_path, capsys):
    path = written(
        tmp_path, [HELPS, SAME, HELPS | {"name": "on", "cells": ["plain", "online"], "effect": 0.2}]
    )
    trained(path)
    assert results.main([str(path), "--out", str(tmp_path / "o"), "--power"]) == 0
    said = capsys.readouterr().out
    rows = {row["test"]: row for row in csv.DictReader((tmp_path / "o" / "decisions.csv").open())}
    scores = {name: np.array(values) for name, values in SCORES.items()}
    p = {
        "helps": stats.ttest_rel(scores["hl"], scores["plain"]).pvalue,
        "hl − online": max(
            stats.ttest_1samp(scores["hl"] - scores["online"], -0.05, alternative="greater").pvalue,
            stats.ttest_1samp(scores["hl"] - scores["online"], 0.05, alternative="less").pvalue,
        ),
        "on": stats.ttest_rel(scores["online"], scores["plain"]).pvalue,
    }
    order, largest, by_hand = sorted(p, key=lambda name: p[name]), 0.0, {}
    for rank, name in enumerate(order):
        by_hand[name] = largest = max(largest, (3 - rank) * p[name])
    for name, row in rows.items():
        assert row["p"] == results.shown_p(p[name]) and row["p, Holm"] == results.shown_p(by_hand[name])
    apart = scores["hl"] - scores["plain"]
    low, high = stats.t.interval(0.95, 4, apart.mean(), stats.sem(apart))
    helps = rows["helps"]
    assert (helps["mean"], helps["median"]) == (f"{apart.mean():.4g}", f"{np.median(apart):.4g}")
    assert helps["95 % interval"] == f"[{low:.4g}, {high:.4g}]"
    assert (helps["seeds"], helps["seeds ahead"], helps["failed runs"]) == ("5 of 5", "4 of 5", "0")
    assert (helps["decided"], helps["larger than what matters"]) == ("higher", "yes")
    assert rows["hl − online"]["decided"] == "the same within ±0.05"
    assert (rows["on"]["decided"], rows["on"]["larger than what matters"]) == ("higher", "no")
    spread = f"| helps | 0.02 | {apart.std(ddof=1):.3g} | 5 |"
    assert "Power for the planned tests:" in said and spread in said and "at 0.05/3" in said
    assert "## " not in said and "Tests: " not in said, "no other pairs are tested beside them"
    assert "<h2>Planned tests</h2>" in (tmp_path / "o" / "index.html").read_text()


def test_numbers_are_shown_to_the_end_alone_and_failed_runs_are_counted(tmp_path, capsys):
    path = written(tmp_path, [HELPS, SAME], seeds=3)
    trained(path, without=("s-hl-s2", "s-online-s3"))
    given = [str(path), "--out", str(tmp_path / "o"), "--logs", str(tmp_path / "logs")]
    assert results.main(given) == 0
    assert "| 2 of 3 | – | – | – | – | 0 | – | – | not yet: 1 runs to come | – |" in capsys.readouterr().out
    for name in ("s-hl-s2", "s-online-s3"):
        failed(tmp_path / "logs", name)
    assert results.main(given) == 0
    rows = list(csv.DictReader((tmp_path / "o" / "decisions.csv").open()))
    assert [(row["seeds"], row["failed runs"]) for row in rows] == [("2 of 3", "1"), ("1 of 3", "2")]
    apart = np.delete(np.array(SCORES["hl"][:3]) - np.array(SCORES["plain"][:3]), 1)
    assert rows[0]["p"] == results.shown_p(stats.ttest_1samp(apart, 0).pvalue)


def test_a_list_of_cells_is_their_mean_of_each_seed(tmp_path, capsys):
    path = written(tmp_path, [HELPS | {"name": "", "cells": [["plain", "online"], ["hl", "online"]]}])
    trained(path)
    assert results.main([str(path), "--out", str(tmp_path / "o")]) == 0
    (row,) = csv.DictReader((tmp_path / "o" / "decisions.csv").open())
    apart = (np.array(SCORES["hl"]) - np.array(SCORES["plain"])) / 2
    assert row["test"] == row["second − first"] == "hl & online − plain & online"
    assert (row["mean"], row["seeds"], row["failed runs"]) == (f"{apart.mean():.4g}", "5 of 5", "0")
    assert row["p"] == results.shown_p(stats.ttest_1samp(apart, 0).pvalue)


@pytest.mark.parametrize(("n", "margin"), [(4, 2.0), (10, 1.0), (25, 0.7)])
def test_power_of_equivalence_is_that_of_many_draws(n, margin):
    draws = np.random.default_rng(0).normal(size=(20_000, n))
    error = draws.std(axis=1, ddof=1) / math.sqrt(n)
    t = (margin - np.abs(draws.mean(axis=1))) / error
    share = (t > stats.t.isf(0.05 / 3, n - 1)).mean()
    assert equivalence_power(margin, 1.0, n, 0.05 / 3) == pytest.approx(share, abs=0.012)
    assert equivalence_power(margin, 0.0, n, 0.05) == 1.0
