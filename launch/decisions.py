"""The tests that a sweep file plans (``tests:``), decided with Holm's correction over all of them.

A test shows its numbers once all runs of its two cells have ended, so that nobody stops where it looks well.
Seeds of which a run ended without a number have no pair; the table says how many such runs there are.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median, stdev

from common.errors import require
from launch.collect import Cell
from launch.frontier import ENOUGH, seeds_needed
from launch.grid import SAME, PlannedTest, Sweep
from launch.state import FAILED
from reports.outcome import FINISHED, NOTHING_LEARNT
from reports.statistics import (
    FEWEST_PAIRS,
    SIGNIFICANT,
    differences,
    equivalence,
    equivalence_power,
    holm,
    mean,
    paired,
    paired_power,
    shown_p,
)

ENDED = (FINISHED, NOTHING_LEARNT, FAILED)
HEAD = (
    *("test", "second − first", "metric", "asks", "seeds", "mean", "median", "95 % interval"),
    *("seeds ahead", "failed runs", "p", "p, Holm", "decided", "larger than what matters"),
)
NOTE = (
    "Planned tests: second cell minus first, paired by seed, by a two-sided t-test, or by two one-sided ones "
    "where the question is whether they are the same; decided at 0.05 after Holm–Bonferroni over all {}. A "
    "seed is ahead where its difference is above 0. Failed runs ended without the number. Larger than what "
    "matters: whether the mean is at least the smallest effect that matters, in either direction. A test "
    "with runs to come shows no number and counts as p = 1."
)


@dataclass(frozen=True)
class Decision:
    """A planned test with what its runs say. ``differences``: of the seeds that both cells have a number of.
    ``failed``, ``to_come``: runs of both cells. ``p``: None with runs to come, and where it is not
    defined."""

    test: PlannedTest
    planned: int
    differences: tuple[float, ...]
    failed: int
    to_come: int
    p: float | None
    p_holm: float = 1.0

    @property
    def word(self) -> str:
        """The decision in words."""
        if self.to_come:
            return f"not yet: {self.to_come} runs to come"
        if self.p is None or self.p_holm >= SIGNIFICANT:
            return "no"
        if self.test.kind == SAME:
            return f"the same within ±{self.test.effect:g}"
        return "higher" if fmean(self.differences) > 0 else "lower"


def decide(sweep: Sweep, cells: Sequence[Cell]) -> list[Decision]:
    """Return the decision of each of the sweep's tests. Raises ConfigError for a cell that the table does not
    have, and for a metric that finished runs lack."""
    by_name = {cell.name.removeprefix(f"{sweep.name}-"): cell for cell in cells}
    metrics = sorted({key for cell in cells for run in cell.finished for key in run.values})
    decisions = []
    for test in sweep.tests:
        for cell in itertools.chain(*test.sides):
            there = f"is no cell of the table: {', '.join(by_name)}"
            require(cell in by_name, f"tests: {test.name}: cells", cell, there)
        numbers = f"is a number of no finished run; there are {', '.join(metrics)}"
        require(not metrics or test.metric in metrics, f"tests: {test.name}: metric", test.metric, numbers)
        sides = [[by_name[cell] for cell in side] for side in test.sides]
        first, second = (seed_means([cell.values(test.metric) for cell in side]) for side in sides)
        cells_of_test = list(itertools.chain(*sides))
        runs = [run for cell in cells_of_test for run in cell.chosen]
        apart = tuple(differences(first, second))
        to_come = sum(run.status not in ENDED for run in runs)
        failed = len(runs) - to_come - sum(len(cell.values(test.metric)) for cell in cells_of_test)
        p = None
        if not to_come and len(apart) >= FEWEST_PAIRS:
            same = test.kind == SAME
            p = equivalence(apart, test.effect) if same else paired("", "", apart).p_t
        decisions.append(Decision(test, len(sweep.seeds), apart, failed, to_come, p))
    corrected = holm([1.0 if decision.p is None else decision.p for decision in decisions])
    return [replace(d, p_holm=p) for d, p in zip(decisions, corrected, strict=True) if p is not None]


def seed_means(values: Sequence[dict[int, float]]) -> dict[int, float]:
    """Return seed -> mean over the cells of a side, for the seeds of which every cell has a value."""
    seeds = [seed for seed in values[0] if all(seed in other for other in values)]
    return {seed: fmean(of_cell[seed] for of_cell in values) for seed in seeds}


def decision_rows(decisions: Sequence[Decision]) -> list[list[str]]:
    """Return the table, heading first."""
    out = [list(HEAD)]
    for d in decisions:
        test, apart, numbers = d.test, d.differences, ["–"] * 4
        middle = None if d.to_come else mean(apart)
        if middle is not None:
            low, high = middle.interval
            interval = "–" if middle.error is None else f"[{low:.4g}, {high:.4g}]"
            ahead = f"{sum(one > 0 for one in apart)} of {len(apart)}"
            numbers = [f"{middle.value:.4g}", f"{median(apart):.4g}", interval, ahead]
        larger = "–" if middle is None else "yes" if abs(middle.value) >= test.effect else "no"
        asks = f"same within ±{test.effect:g}" if test.kind == SAME else f"different; {test.effect:g} matters"
        what = [test.name, test.difference, test.metric, asks]
        p_values = [shown_p(d.p), "–" if d.p is None else shown_p(d.p_holm)]
        out.append(
            [*what, f"{len(apart)} of {d.planned}", *numbers, str(d.failed), *p_values, d.word, larger]
        )
    return out


def planned_power_rows(decisions: Sequence[Decision]) -> list[list[str]]:
    """Return a heading, then for each test the spread of the paired differences that there are, the power of
    the sweep's seeds at Holm's first threshold (for the smallest effect that matters, or for *same* where
    there is no difference), and the seeds that ENOUGH needs."""
    level = SIGNIFICANT / len(decisions)
    power = f"power of the sweep's seeds at {SIGNIFICANT}/{len(decisions)}"
    out = [["test", "smallest effect", "SD of differences", "of seeds", power, f"seeds for {ENOUGH:g}"]]
    for d in decisions:
        row = [d.test.name, f"{d.test.effect:g}"]
        if len(d.differences) < FEWEST_PAIRS:
            out.append([*row, "–", str(len(d.differences)), "–", "–"])
            continue
        power_of = equivalence_power if d.test.kind == SAME else paired_power
        deviation = stdev(d.differences)
        now = power_of(d.test.effect, deviation, d.planned, level)
        needed = seeds_needed(d.test.effect, deviation, level, power_of)
        out.append([*row, f"{deviation:.3g}", str(len(d.differences)), f"{now:.2f}", needed])
    return out
