"""pass@k against its definition, the bootstrap against the formulas that it stands in for, the tests against
sums done by hand."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from reports.statistics import intervals, mean_of, paired_tests, pass_at_k, table_of

counts = st.integers(1, 7).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n)))


@given(counts)
def test_pass_at_k_is_the_share_of_draws_of_k_with_a_right_one(drawn):
    """Of many samples it neither overflows nor rounds to nothing."""
    n, correct, k = drawn
    answers = [True] * correct + [False] * (n - correct)
    draws = [any(draw) for draw in itertools.combinations(answers, k)]
    assert pass_at_k(n, correct, k) == pytest.approx(sum(draws) / len(draws), abs=1e-12)
    assert 0 < pass_at_k(10_000, 1, 1) < 1.01e-4 and pass_at_k(1024, 512, 1024) == 1.0


def interval(values, resamples=4000, confidence=0.95):
    return intervals({"m": np.asarray(values, np.float64)}, resamples, confidence)["m"]


def test_over_problems_alone_it_is_the_standard_error_of_the_mean():
    values = np.random.default_rng(1).random((1, 400))
    low, high = interval(values)
    error = values.std() / math.sqrt(400)
    assert (high - low) / 2 == pytest.approx(1.96 * error, rel=0.06)
    assert (high + low) / 2 == pytest.approx(values.mean(), abs=error / 5)


def test_over_runs_it_also_has_their_spread():
    """Crossed: problems that are all alike leave the variance of runs, runs that are all alike that of
    problems."""
    by_run = np.repeat(np.random.default_rng(2).random((30, 1)), 50, axis=1)
    low, high = interval(by_run)
    assert (high - low) / 2 == pytest.approx(1.96 * by_run[:, 0].std() / math.sqrt(30), rel=0.1)
    by_problem = np.repeat(np.random.default_rng(3).random((1, 200)), 5, axis=0)
    assert interval(by_problem) == pytest.approx(interval(by_problem[:1]), abs=0.01)
    both = by_run[:, :1] + np.random.default_rng(4).random((1, 50))
    low, high = interval(both)
    assert (high - low) / 2 == pytest.approx(
        1.96 * math.sqrt(by_run[:, 0].var() / 30 + both[0].var() / 50), rel=0.1
    )


@given(st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=30))
@settings(max_examples=25)
def test_an_interval_lies_within_the_values_and_is_always_the_same(values):
    low, high = interval([values], 200)
    assert min(values) <= low <= high <= max(values)
    assert interval([values], 200) == (low, high)


def test_what_is_not_there_is_left_out():
    table = table_of([{"a": 1.0, "b": 0.0}, {"b": 1.0, "c": 1.0}])
    assert mean_of(table) == pytest.approx(3 / 4)
    assert np.isnan(table).sum() == 2
    whole = np.random.default_rng(6).random((1, 200))
    holed = np.concatenate([whole, np.full((1, 200), np.nan)], axis=1)
    assert np.diff(interval(holed)) == pytest.approx(np.diff(interval(whole)), rel=0.15)
    assert interval([[np.nan, np.nan]]) is None and mean_of(np.full((1, 2), np.nan)) is None


def test_paired_tests_are_the_binomial_tail_and_that_of_the_mean_difference():
    found = paired_tests([1.0] * 8 + [-1.0] * 2 + [0.0] * 5)
    tail = sum(math.comb(10, k) for k in range(8, 11)) / 2**10
    assert found["p_sign"] == pytest.approx(2 * tail)
    assert paired_tests([0.4] * 8 + [-1.0] * 2, tie=0.5)["p_sign"] == pytest.approx(2 / 2**2)
    differences = [0.5, 1.5, -0.25, 2.0, 0.75]
    found = paired_tests(differences)
    assert found["p_t"] == pytest.approx(stats.ttest_1samp(differences, 0).pvalue)
    assert found["p_wilcoxon"] == pytest.approx(stats.wilcoxon(differences).pvalue)
    assert paired_tests([0.0, 0.0, 0.0]) == {"p_t": 1.0, "p_wilcoxon": 1.0, "p_sign": 1.0}
    assert paired_tests([0.5]) == {"p_t": None, "p_wilcoxon": None, "p_sign": 1.0}
