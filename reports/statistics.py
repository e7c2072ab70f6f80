"""The statistics of a results table, with mean and standard error over seeds, paired tests, and Holm's
correction."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev

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
    import numpy as np
    from scipy import stats

    quantiles = (np.arange(1000) + 0.5) / 1000
    seen = np.sqrt(stats.chi2.ppf(quantiles, n - 1) / (n - 1))
    reach = margin / deviation * math.sqrt(n) - stats.t.isf(level, n - 1) * seen
    return float(np.maximum(2 * stats.norm.cdf(reach) - 1, 0.0).mean())
