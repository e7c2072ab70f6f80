"""The statistics of a results table, with mean and standard error over seeds, paired tests, and Holm's
correction; and those of an evaluation, with pass@k, and bootstrap intervals over problems and seeds."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev

import numpy as np

FEWEST_PAIRS = 2
SIGNIFICANT = 0.05


@dataclass(frozen=True)
class SeedMean:
    """Mean over ``n`` seeds and its standard error (sample standard deviation / sqrt n), which is None with
    one seed."""

    value: float
    error: float | None
    n: int

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % confidence interval (Student's t); infinite for one seed."""
        if self.error is None:
            return -math.inf, math.inf
        from scipy import stats

        half = float(stats.t.isf(0.025, self.n - 1)) * self.error
        return self.value - half, self.value + half


@dataclass(frozen=True)
class Comparison:
    """Cell ``b`` minus cell ``a`` over the seeds that both have. The p-values ``p_*`` are two-sided, and None
    where the test is not defined."""

    a: str
    b: str
    difference: SeedMean
    p_t: float | None
    p_wilcoxon: float | None
    p_t_holm: float | None = None
    p_wilcoxon_holm: float | None = None

    @property
    def significant(self) -> bool:
        """Whether the paired t-test is significant after Holm's correction over all comparisons of the
        table."""
        return self.p_t_holm is not None and self.p_t_holm < SIGNIFICANT


def mean(values: Sequence[float]) -> SeedMean | None:
    """Return the mean and standard error; None for no values."""
    if not values:
        return None
    return SeedMean(
        fmean(values), stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None, len(values)
    )


def shown(value: SeedMean | None) -> str:
    """Return a mean and its standard error as text."""
    if value is None:
        return "–"
    return f"{value.value:.4g}" if value.error is None else f"{value.value:.4g} ± {value.error:.2g}"


def shown_p(p: float | None) -> str:
    """Return a p value as text, a small one as ``5e-12``."""
    return "–" if p is None else f"{p:.4f}" if p >= 1e-4 else f"{p:.0e}"


def compare(cells: Mapping[str, Mapping[int, float]], baseline: str | None = None) -> list[Comparison]:
    """Compare every pair of cells (or each cell with ``baseline``) that has at least two seeds in common.
    ``cells``: name -> seed -> value.

    Tests are paired by seed: runs with the same seed see the same data in the same order.
    """
    pairs = (
        [(baseline, name) for name in cells if name != baseline]
        if baseline
        else list(itertools.combinations(cells, 2))
    )
    return with_holm((a, b, differences(cells[a], cells[b])) for a, b in pairs)


def differences(a: Mapping[int, float], b: Mapping[int, float]) -> list[float]:
    """Return ``b`` minus ``a`` (seed -> value) over the seeds that both have, in their order."""
    return [b[seed] - a[seed] for seed in sorted(a.keys() & b.keys())]


def with_holm(pairs: Iterable[tuple[str, str, Sequence[float]]]) -> list[Comparison]:
    """Return the comparisons of those ``pairs`` (a, b, differences by seed) that have FEWEST_PAIRS, with
    their p-values adjusted over all of them."""
    comparisons = [paired(a, b, apart) for a, b, apart in pairs if len(apart) >= FEWEST_PAIRS]
    adjusted = zip(
        comparisons,
        holm([c.p_t for c in comparisons]),
        holm([c.p_wilcoxon for c in comparisons]),
        strict=True,
    )
    return [replace(c, p_t_holm=t, p_wilcoxon_holm=wilcoxon) for c, t, wilcoxon in adjusted]


def paired(a: str, b: str, differences: Sequence[float]) -> Comparison:
    """Return one comparison. If all differences are 0, p = 1; if they are equal but not 0, there is no
    t-test."""
    from scipy import stats  # two seconds, which a table without tests is spared

    middle = mean(differences)
    assert middle is not None
    if not any(differences):
        return Comparison(a, b, middle, 1.0, 1.0)
    spread = max(differences) - min(differences)
    t = (
        float(stats.ttest_1samp(differences, 0.0).pvalue)
        if spread > 1e-12 * max(map(abs, differences))
        else None
    )
    return Comparison(a, b, middle, t, float(stats.wilcoxon(differences).pvalue))


def equivalence(differences: Sequence[float], margin: float) -> float | None:
    """Return the p-value of two one-sided paired t-tests, whose null hypothesis is a mean difference outside
    ±``margin``: the larger of the two. If all differences are 0, p = 0; if they are equal but not 0, there is
    no t-test."""
    from scipy import stats

    if not any(differences):
        return 0.0
    if max(differences) - min(differences) <= 1e-12 * max(map(abs, differences)):
        return None
    sides = ((-margin, "greater"), (margin, "less"))
    return max(float(stats.ttest_1samp(differences, at, alternative=side).pvalue) for at, side in sides)


def holm(values: Sequence[float | None]) -> list[float | None]:
    """Return p-values adjusted by Holm (1979): the i-th smallest of m is multiplied by m - i + 1, then they
    are made monotone and capped at 1. None stays None."""
    ordered = sorted((p, i) for i, p in enumerate(values) if p is not None)
    adjusted: list[float | None] = [None] * len(values)
    largest = 0.0
    for rank, (p, i) in enumerate(ordered):
        largest = max(largest, min(1.0, (len(ordered) - rank) * p))
        adjusted[i] = largest
    return adjusted


def paired_power(effect: float, deviation: float, n: int, level: float) -> float:
    """Return the power of a two-sided paired t-test over ``n`` pairs at significance ``level``, where their
    differences have the mean ``effect`` and the standard deviation ``deviation``."""
    if n < FEWEST_PAIRS or deviation <= 0:
        return float(effect != 0)
    from scipy import stats

    critical = stats.t.isf(level / 2, n - 1)
    shift = effect / deviation * math.sqrt(n)
    return float(stats.nct.sf(critical, n - 1, shift) + stats.nct.cdf(-critical, n - 1, shift))


def equivalence_power(margin: float, deviation: float, n: int, level: float) -> float:
    """Return the power of ``equivalence`` over ``n`` pairs at significance ``level``, where their differences
    have the mean 0 and the standard deviation ``deviation``: the mean over the spreads that ``n`` pairs can
    show."""
    if n < FEWEST_PAIRS or deviation <= 0:
        return float(n >= FEWEST_PAIRS)
    from scipy import stats

    quantiles = (np.arange(1000) + 0.5) / 1000
    seen = np.sqrt(stats.chi2.ppf(quantiles, n - 1) / (n - 1))
    reach = margin / deviation * math.sqrt(n) - stats.t.isf(level, n - 1) * seen
    return float(np.maximum(2 * stats.norm.cdf(reach) - 1, 0.0).mean())


# -- evaluations -----------------------------------------------------------------------------------

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
    crossed: every drawn run is evaluated on the same drawn problems. The draws come from a fixed seed, so all
    metrics of one shape have the same. None for a metric without any number.
    """
    return {name: _interval(values, resamples, confidence) for name, values in metrics.items()}


def _interval(values: np.ndarray, resamples: int, confidence: float) -> Interval | None:
    if not np.isfinite(values).any():
        return None
    rng, drawn = np.random.default_rng(0), []
    for first in range(0, resamples, _BLOCK):
        size = min(_BLOCK, resamples - first)
        problems = _counts(rng, values.shape[1], size)
        runs = _counts(rng, len(values), size) if len(values) > 1 else np.ones((size, 1))
        drawn.append(_means(values, runs, problems))
    tail = (1 - confidence) / 2
    low, high = np.nanquantile(np.concatenate(drawn), [tail, 1 - tail])
    return float(low), float(high)


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
    from scipy import stats

    wins, losses = sum(d > tie for d in differences), sum(d < -tie for d in differences)
    sign = float(stats.binomtest(wins, wins + losses).pvalue) if wins + losses else 1.0
    if len(differences) < 2:
        return {"p_t": None, "p_wilcoxon": None, "p_sign": sign}
    comparison = paired("", "", differences)
    return {"p_t": comparison.p_t, "p_wilcoxon": comparison.p_wilcoxon, "p_sign": sign}
