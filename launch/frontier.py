"""Arms of a sweep compared fairly: what each reaches at a distance from its start, with as many settings
tried for each, at one setting common to all, and each tuned.

A sweep names its arms as ``cells`` and crosses them with the settings that are tried (its grid), as
sweeps/surface.yaml does. A method can look better than another because its learning rate suits it, or because
it has gone further from the start; so every contrast says what it holds equal.

| contrast | held equal |
|---|---|
| common setting | the setting whose mean over all arms is best |
| each tuned | the number of settings tried; each arm at the best mean of its own |
| equal KL | the KL from the start: the mean distance between the arms' frontiers, where both reach |

A frontier is the best value that an arm has at a KL or below, seed by seed, linear between points. The best
setting is chosen by the numbers that are compared, so tuned arms look a little better than they are.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import TYPE_CHECKING

import numpy as np

from common.errors import require
from launch.collect import Cell
from launch.grid import Sweep
from reports.statistics import (
    FEWEST_PAIRS,
    SIGNIFICANT,
    Comparison,
    differences,
    mean,
    paired_power,
    shown,
    with_holm,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KL, LENGTH = "eval_kl_initial", "eval_length_sampled"
ARMS = "cells"
MOST_SEEDS, ENOUGH = 1000, 0.8

Power = Callable[[float, float, int, float], float]
Setting = tuple[str, ...]
"""A value of each axis but the arms'"""


@dataclass(frozen=True)
class Point:
    """One setting of one arm: seed -> value."""

    score: Mapping[int, float]
    kl: Mapping[int, float]
    length: Mapping[int, float]


@dataclass(frozen=True)
class Frontier:
    """``axes``: the tried axes and their values; ``arms``: arm -> setting -> point, of settings with at least
    one finished seed. The first arm is what the others are compared with."""

    axes: Mapping[str, tuple[str, ...]]
    arms: Mapping[str, Mapping[Setting, Point]]

    @classmethod
    def of(cls, sweep: Sweep, cells: Sequence[Cell], metric: str) -> Frontier:
        """Raises ConfigError for a sweep that does not cross several arms with a setting."""
        axes = dict(sweep.axes)
        names = axes.pop(ARMS, ())
        crossed = len(names) > 1 and any(len(values) > 1 for values in axes.values())
        tried = "compares arms (cells:) over settings that are tried for each (grid:), as in "
        require(crossed, "--frontier", sweep.name, f"{tried}sweeps/surface.yaml")
        require(not sweep.select, "--frontier", sweep.name, "chooses among settings: leave select out")
        at = list(sweep.axes).index(ARMS)
        arms: dict[str, dict[Setting, Point]] = {name: {} for name in names}
        points = {"-".join((sweep.name, *point)): point for point in itertools.product(*sweep.axes.values())}
        for cell in cells:
            where = points.get(cell.name)
            if where is not None and cell.values(metric):
                point = Point(cell.values(metric), cell.values(KL), cell.values(LENGTH))
                arms[where[at]][where[:at] + where[at + 1 :]] = point
        return cls(axes, {name: points for name, points in arms.items() if points})

    @property
    def common(self) -> Setting | None:
        """The setting that all arms have whose mean over arms is best; None if they share none."""
        shared = set.intersection(*(set(points) for points in self.arms.values()))
        return max(sorted(shared), key=lambda s: fmean(self.at(arm, s) for arm in self.arms), default=None)

    def at(self, arm: str, setting: Setting) -> float:
        """Return the mean score over seeds."""
        return fmean(self.arms[arm][setting].score.values())

    def best(self, arm: str) -> Setting:
        """Return the setting with the best mean score; of equal ones the one on fewest edges, since a grid
        whose scores are flat there is wide enough."""
        return max(sorted(self.arms[arm]), key=lambda s: (self.at(arm, s), -len(self.edges(s))))

    def edges(self, setting: Setting) -> list[str]:
        """Return the axes on whose edge the setting lies: a wider grid may hold a better one."""
        return [
            axis
            for (axis, values), value in zip(self.axes.items(), setting, strict=True)
            if len(values) > 1 and value in (values[0], values[-1])
        ]

    def contrasts(self) -> list[Comparison]:
        """Return each arm minus the first one in every contrast, paired by seed, with Holm's correction over
        all of them."""
        first = next(iter(self.arms))
        return with_holm((first, name, d) for name, d in self.differences())

    def differences(self) -> Iterator[tuple[str, list[float]]]:
        """Yield (contrast and arm, the arm minus the first one for each seed)."""
        first, *others = self.arms
        for arm in others:
            common = self.common
            pairs = {f"each tuned: {arm}": (self.best(first), self.best(arm))}
            if common is not None:
                pairs = {f"common setting {', '.join(common)}: {arm}": (common, common)} | pairs
            for name, (a, b) in pairs.items():
                yield name, differences(self.arms[first][a].score, self.arms[arm][b].score)
            apart = [d for seed in self.seeds if (d := self.at_equal_kl(first, arm, seed)) is not None]
            yield f"equal KL: {arm}", apart

    @property
    def seeds(self) -> list[int]:
        return sorted({seed for points in self.arms.values() for p in points.values() for seed in p.score})

    def at_equal_kl(self, a: str, b: str, seed: int) -> float | None:
        """Return the mean of b's frontier minus a's, over the points of both within the KLs that both reach;
        None if their KLs do not overlap."""
        both = [self.frontier(arm, seed) for arm in (a, b)]
        if any(len(kl) == 0 for kl, _ in both):
            return None
        low, high = max(kl[0] for kl, _ in both), min(kl[-1] for kl, _ in both)
        at = np.array([kl for kls, _ in both for kl in kls if low <= kl <= high])
        if not at.size:
            return None
        value_a, value_b = (np.interp(at, kl, best) for kl, best in both)
        return float((value_b - value_a).mean())

    def frontier(self, arm: str, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """Return ([n] KLs in ascending order, nats a token; [n] the best score at that KL or below)."""
        points = sorted(
            (p.kl[seed], p.score[seed])
            for p in self.arms[arm].values()
            if seed in p.kl and seed in p.score and np.isfinite(p.kl[seed])
        )
        kl, score = np.array(points).reshape(-1, 2).T
        return kl, np.maximum.accumulate(score) if len(score) else score

    def rows(self) -> list[list[str]]:
        """Return the table of the arms at their best, heading first."""
        out = [["arm", "settings tried", "best", "at an edge of", "score", "KL, nats/token", "length"]]
        for arm, points in self.arms.items():
            best = self.best(arm)
            point = points[best]
            numbers = [mean(list(values.values())) for values in (point.score, point.kl, point.length)]
            where = [", ".join(best), ", ".join(self.edges(best)) or "none"]
            out.append([arm, str(len(points)), *where, *map(shown, numbers)])
        return out

    def figure(self) -> Figure:
        """Draw the score against the KL from the start and against the length: small dots are single runs,
        lines the means of the arms' frontiers over seeds."""
        from matplotlib.figure import Figure

        from launch.pictures import COLORS

        figure = Figure(figsize=(8, 3.4), layout="constrained")
        axes = figure.subplots(1, 2, sharey=True)
        for color, (arm, points) in zip(COLORS * len(self.arms), self.arms.items(), strict=False):
            for ax, name in zip(axes, ("kl", "length"), strict=True):
                dots = [
                    (getattr(p, name)[seed], p.score[seed])
                    for p in points.values()
                    for seed in p.score.keys() & getattr(p, name).keys()
                ]
                ax.plot([x for x, _ in dots], [y for _, y in dots], ".", color=color, markersize=4, label=arm)
            lines = [line for seed in self.seeds if len((line := self.frontier(arm, seed))[0])]
            if lines:
                at = np.linspace(max(kl[0] for kl, _ in lines), min(kl[-1] for kl, _ in lines), 50)
                if at[0] < at[-1]:
                    means = np.mean([np.interp(at, kl, best) for kl, best in lines], axis=0)
                    axes[0].plot(at, means, color=color, linewidth=1.5)
        axes[0].set_xlabel("KL from the start, nats a token")
        axes[1].set_xlabel("length of answers, tokens")
        axes[0].set_ylabel("score")
        axes[0].legend(fontsize=7.5)
        return figure


def power_rows(comparisons: Sequence[Comparison], effect: float, tests: int) -> list[list[str]]:
    """Return a heading, then for each comparison the spread of its paired differences, the power that its
    seeds have for ``effect`` at SIGNIFICANT / ``tests`` (Holm's first threshold), and the seeds that ENOUGH
    needs; at the end, the same for the median spread."""
    level = SIGNIFICANT / tests
    head = ["comparison", "SD of differences", "seeds", f"power at {SIGNIFICANT}/{tests}"]
    out = [[*head, f"seeds for {ENOUGH:g}"]]
    spreads = []
    for c in comparisons:
        if c.difference.error is None:
            continue
        deviation = c.difference.error * c.difference.n**0.5
        spreads.append(deviation)
        now = f"{paired_power(effect, deviation, c.difference.n, level):.2f}"
        needed = seeds_needed(effect, deviation, level)
        out.append([f"{c.b} − {c.a}", f"{deviation:.3g}", str(c.difference.n), now, needed])
    if spreads:
        middle = median(spreads)
        out.append(["the median spread", f"{middle:.3g}", "", "", seeds_needed(effect, middle, level)])
    return out


def seeds_needed(effect: float, deviation: float, level: float, power_of: Power = paired_power) -> str:
    """Return the fewest seeds whose test has the power ENOUGH; ``power_of``: the test's power, for an effect,
    a deviation, a number of seeds and a level."""
    for n in range(FEWEST_PAIRS, MOST_SEEDS + 1):
        if power_of(effect, deviation, n, level) >= ENOUGH:
            return str(n)
    return f"more than {MOST_SEEDS}"
