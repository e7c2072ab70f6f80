"""The rows of a results table, each with the runs of the chosen setting, which differ by their seed alone."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from common.errors import require
from launch.collect import Result
from launch.grid import unselected
from reports.outcome import FINISHED
from reports.statistics import SeedMean, mean


@dataclass(frozen=True)
class Cell:
    """One row of the table: the runs of the chosen setting, and those of all settings tried."""

    name: str
    chosen: list[Result]
    tried: list[list[Result]]
    """Runs by setting, including the chosen one."""
    selected: dict[str, object]
    """The chosen values of the keys that were tried."""

    @property
    def finished(self) -> list[Result]:
        return [run for run in self.chosen if run.status == FINISHED]

    def values(self, metric: str) -> dict[int, float]:
        """Return seed -> value of the finished runs that have the metric."""
        return {run.seed: run.values[metric] for run in self.finished if metric in run.values}

    def mean(self, metric: str) -> SeedMean | None:
        return mean(list(self.values(metric).values()))

    @property
    def progress(self) -> str:
        """The progress as text: ``3/3``, or with the missing runs: ``1/3, s2 interrupted at step 40, s3 not
        started``."""
        missing = [
            f"s{run.seed} {run.status}" + (f" at step {run.step}" if run.step else "")
            for run in self.chosen
            if run.status != FINISHED
        ]
        return ", ".join([f"{len(self.finished)}/{len(self.chosen)}", *missing])


def cells_of(results: Sequence[Result], select: Sequence[str], validation: str) -> list[Cell]:
    """Group results by cell; among settings that differ in ``select`` alone, choose the one with the best
    mean of ``validation``.

    The choice uses the validation metric of finished runs and nothing else. A setting with fewer finished
    seeds than another is not chosen over it. Raises ConfigError for two runs that would be one.
    """
    by_cell: dict[tuple[str, str], dict[str, list[Result]]] = {}
    for run in results:
        stem = run.cell if not select else ""
        by_cell.setdefault((stem, run.identity(select)), {}).setdefault(run.identity(), []).append(run)
    names = [next(iter(settings.values()))[0].cell for settings in by_cell.values()]
    cells = []
    for (_, identity), settings in by_cell.items():
        tried = list(settings.values())
        for run, other in (pair for runs in tried for pair in itertools.combinations(runs, 2)):
            twice = f"and {other.name} have the same settings, seed {run.seed} too: leave one of them out"
            require(run.seed != other.seed, "runs", run.name, twice)
        chosen = max(tried, key=lambda runs: merit(runs, validation))
        selected = {key: chosen[0].settings.get(key) for key in select}
        name = unselected(chosen[0].cell, selected)
        name = name if names.count(tried[0][0].cell) == 1 else f"{name} ({identity})"
        cells.append(Cell(name, sorted(chosen, key=lambda run: run.seed), tried, selected))
    return cells


def merit(runs: Sequence[Result], metric: str) -> tuple[int, float]:
    """Return (finished seeds, mean of the metric, negated for a loss): larger is better."""
    values = [run.values[metric] for run in runs if run.status == FINISHED and metric in run.values]
    value = mean(values)
    return len(values), 0.0 if value is None else -value.value if metric.endswith("loss") else value.value
