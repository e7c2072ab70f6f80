"""Verdicts: decided by the numbers alone, in either direction, corrected for how many there are, and never
made of too few seeds."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from reports.statistics import Mean, paired_power
from study.claims import (
    GREATER,
    MATCH,
    NOT_RUN,
    NOT_SEEN,
    REVERSED,
    SAME,
    SEEN,
    Claim,
    answers,
    interval,
    p_values_of,
    read_claims,
    verdict,
)
from study.plan import FULL, TASKS, read_plan

SEEDS = range(1, 11)


def claim(kind: str, *pairs: tuple[str, str]) -> Claim:
    return Claim("t", "s", "p", "main", kind, pairs or (("b", "a"),), "w")


def cells(shift: float, noise: float = 0.01, seed: int = 0) -> dict[str, dict[int, float]]:
    rng = np.random.default_rng(seed)
    a = {s: 0.7 + rng.normal(0, 0.05) for s in SEEDS}
    return {"a": a, "b": {s: a[s] + shift + rng.normal(0, noise) for s in SEEDS}}


@pytest.mark.parametrize(("shift", "expected"), [(0.1, SEEN), (-0.1, REVERSED), (0.0, NOT_SEEN)])
def test_better_is_seen_not_seen_or_reversed(shift, expected):
    (answer,) = answers([claim(GREATER)], cells(shift), 0.05, {})
    assert answer.verdict == expected
    assert answer.difference.value == pytest.approx(shift, abs=0.01)


@pytest.mark.parametrize(
    ("shift", "expected"), [(0.1, SEEN), (0.0, SEEN), (-0.03, SEEN), (-0.052, NOT_SEEN), (-0.1, REVERSED)]
)
def test_not_worse_is_decided_by_the_interval_against_the_margin(shift, expected):
    assert answers([claim(MATCH)], cells(shift), 0.05, {})[0].verdict == expected


@pytest.mark.parametrize(
    ("shift", "expected"), [(0.1, REVERSED), (0.0, SEEN), (-0.1, REVERSED), (0.052, NOT_SEEN)]
)
def test_the_same_is_decided_on_both_sides(shift, expected):
    assert answers([claim(SAME)], cells(shift), 0.05, {})[0].verdict == expected


def test_a_wide_spread_shows_neither_equality_nor_a_difference():
    noisy = cells(0.0, noise=0.3)
    assert {answers([claim(kind)], noisy, 0.05, {})[0].verdict for kind in (GREATER, MATCH, SAME)} == {
        NOT_SEEN
    }


def test_p_values_are_the_paired_t_tests_corrected_over_every_test_of_the_report():
    values = cells(0.01, noise=0.012)
    single = answers([claim(GREATER)], values, 0.05, {})[0]
    direct = stats.ttest_rel([values["b"][s] for s in SEEDS], [values["a"][s] for s in SEEDS]).pvalue
    assert single.p == pytest.approx(direct) and single.p_holm == pytest.approx(direct)
    several = answers([claim(GREATER, ("b", "a"), ("b", "a"), ("b", "a")), claim(MATCH)], values, 0.05, {})
    assert several[0].p_holm == pytest.approx(min(1.0, 3 * direct)), "the match is no test of the family"
    assert several[3].p_holm is None
    with_others = answers([claim(GREATER)], values, 0.05, {}, others=[direct / 2, 0.9])
    assert with_others[0].p_holm == pytest.approx(min(1.0, 2 * direct)), (
        "one family with another task's tests"
    )
    assert p_values_of(several) == pytest.approx([direct] * 3)


def test_seeds_are_paired_and_too_few_are_no_answer():
    values = cells(0.1)
    values["b"] = {s: v for s, v in values["b"].items() if s <= 2} | {99: 0.0}
    assert answers([claim(GREATER)], values, 0.05, {})[0].verdict == NOT_RUN
    assert answers([claim(GREATER, ("b", "nothing"))], values, 0.05, {})[0].verdict == NOT_RUN


def test_the_interval_is_students():
    points = np.array([0.1, 0.2, 0.4])
    low, high = interval(Mean(float(points.mean()), float(stats.sem(points)), 3))
    expected = stats.t.interval(0.95, 2, points.mean(), stats.sem(points))
    assert (low, high) == pytest.approx(expected)


def test_a_missing_p_decides_nothing():
    assert verdict(GREATER, 0.1, (0.1, 0.1), None, 0.05) == NOT_SEEN


@pytest.mark.parametrize("path", TASKS.values(), ids=TASKS)
def test_every_claim_is_about_cells_that_are_run(path):
    plan = read_plan(path)
    groups = plan.cells(FULL)
    every = {cell for part in groups.values() for cell in part}
    claims, margin, metric = read_claims(path.with_name("claims.yaml"))
    assert 0 < margin <= 0.05 and metric == "eval_accuracy_sampled"
    for one in claims:
        assert one.experiment in groups
        assert all(b in every and a in every and a != b for b, a in one.pairs)
        own = set(groups[one.experiment])
        assert all({a, b} & own for b, a in one.pairs), (
            "a claim belongs to the experiment that its runs are of"
        )


@pytest.mark.parametrize(("effect", "level"), [(0.05, 0.05), (0.05, 0.05 / 43), (-0.03, 0.01)])
def test_the_power_is_the_share_of_simulated_tests_that_are_significant(effect, level):
    rng = np.random.default_rng(1)
    drawn = rng.normal(effect, 0.04, (40_000, 10))
    share = (stats.ttest_1samp(drawn, 0.0, axis=1).pvalue < level).mean()
    assert paired_power(effect, 0.04, 10, level) == pytest.approx(share, abs=0.01)
