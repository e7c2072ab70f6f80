"""Statistics of evaluations, namely pass@k, bootstrap intervals over problems and seeds, and paired tests."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from scipy import stats

from reports.statistics import paired

Interval = tuple[float, float]
_BLOCK = 500
"""Number of resamples made at once, to bound memory."""


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Return the unbiased estimate of the probability that at least one of ``k`` answers is right.

    It is 1 - C(n - c, k) / C(n, k) for ``n`` answers of which c = ``correct`` are right (Chen et al. 2021,
    arXiv 2107.03374, eq. 1). ``1 <= k <= n``."""
    assert 0 <= correct <= n and 1 <= k <= n
    return 1 - math.comb(n - correct, k) / math.comb(n, k)


def table_of(runs: Sequence[Mapping[str, float]]) -> np.ndarray:
    """Return the values of all runs as [runs, problems] float64, with the problems sorted.

    ``runs``: problem -> value for each run. nan where a run has no value for a problem that another has."""
    problems = sorted({problem for run in runs for problem in run})
    return np.array([[run.get(problem, np.nan) for problem in problems] for run in runs], np.float64).reshape(
        len(runs), len(problems)
    )


def mean_of(values: np.ndarray) -> float | None:
    """Return the mean of all numbers of [runs, problems], nan left out; None if there is no number."""
    return float(np.nanmean(values)) if np.isfinite(values).any() else None


def intervals(
    metrics: Mapping[str, np.ndarray], resamples: int, confidence: float
) -> dict[str, Interval | None]:
    """Return a percentile bootstrap interval of the mean of each metric's [runs, problems], nan left out.

    Problems are drawn with replacement, and so are runs (seeds) if there are several. The two draws are
    crossed: every drawn run is evaluated on the same drawn problems. All metrics of one shape share the
    draws, which come from a fixed seed. None for a metric without any number.
    """
    shapes = {values.shape for values in metrics.values()}
    out: dict[str, Interval | None] = {}
    for shape in sorted(shapes):
        names = [
            name for name, values in metrics.items() if values.shape == shape and np.isfinite(values).any()
        ]
        drawn: dict[str, list[np.ndarray]] = {name: [] for name in names}
        rng = np.random.default_rng(0)
        for first in range(0, resamples if names else 0, _BLOCK):
            size = min(_BLOCK, resamples - first)
            problems = _counts(rng, shape[1], size)
            runs = _counts(rng, shape[0], size) if shape[0] > 1 else np.ones((size, 1))
            for name in names:
                drawn[name].append(_means(metrics[name], runs, problems))
        tail = (1 - confidence) / 2
        for name in names:
            low, high = np.nanquantile(np.concatenate(drawn[name]), [tail, 1 - tail])
            out[name] = (float(low), float(high))
    return {name: out.get(name) for name in metrics}


def _counts(rng: np.random.Generator, n: int, size: int) -> np.ndarray:
    """Return [size, n] how often each of ``n`` items was drawn, in ``size`` samples of ``n`` with
    replacement."""
    picks = rng.integers(0, n, (size, n)) + n * np.arange(size)[:, None]
    return np.bincount(picks.reshape(-1), minlength=size * n).reshape(size, n).astype(np.float64)


def _means(values: np.ndarray, runs: np.ndarray, problems: np.ndarray) -> np.ndarray:
    """Return [resamples] weighted means of ``values`` [runs, problems], nan left out.

    The weights are ``runs`` [resamples, runs] times ``problems`` [resamples, problems]."""
    finite = np.isfinite(values)
    sums = np.einsum("br,br->b", runs, problems @ np.where(finite, values, 0.0).T)
    totals = np.einsum("br,br->b", runs, problems @ finite.astype(np.float64).T)
    return np.divide(sums, totals, out=np.full_like(sums, np.nan), where=totals > 0)


def paired_tests(differences: Sequence[float], tie: float = 0.0) -> dict[str, float | None]:
    """Return two-sided p-values of the null hypothesis "no difference", one difference per prompt:
    ``p_t`` of the paired t, ``p_wilcoxon`` of the Wilcoxon signed-rank and ``p_sign`` of the sign test. None
    where a test is not defined.

    The sign test compares wins with losses and leaves out ties, |difference| <= ``tie``. Differences that are
    all 0 have p = 1."""
    wins, losses = sum(d > tie for d in differences), sum(d < -tie for d in differences)
    sign = float(stats.binomtest(wins, wins + losses).pvalue) if wins + losses else 1.0
    if len(differences) < 2:
        return {"p_t": None, "p_wilcoxon": None, "p_sign": sign}
    comparison = paired("", "", differences)
    return {"p_t": comparison.p_t, "p_wilcoxon": comparison.p_wilcoxon, "p_sign": sign}
