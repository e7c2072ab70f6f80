"""Tuning of the main cells by one rule, which the plan states before anything is run.

First every learning rate of the plan is tried, then every value of a second setting at the best learning
rate. The best mean over the tuning seeds wins; of equal means, the smallest value. If the best value is at
its grid's edge, the grid is extended by one value, ``plan.extend`` times at most.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

import yaml  # type: ignore[import-untyped]

from common.files import write_whole
from launch.grid import Run, Settings
from study.plan import Plan

Measure = Callable[[Sequence[Run]], Mapping[str, float]]
"""Makes the runs that do not exist yet; returns the name of each -> the tuned metric."""
Grid = dict[float, list[float]]
"""Tried value -> the metric of each tuning seed."""


@dataclass
class Tuned:
    """The settings that tuning chose, and the runs behind the choice."""

    chosen: dict[str, Settings] = field(default_factory=dict)
    lrs: dict[str, Grid] = field(default_factory=dict)
    """Cell -> the metric at each learning rate."""
    then: dict[str, Grid] = field(default_factory=dict)
    """Cell -> the metric at each value of the second setting."""
    runs: list[Run] = field(default_factory=list)


def tune(plan: Plan, measure: Measure) -> Tuned:
    """Choose the settings of every main cell."""
    found = Tuned()

    def at(lrs: Mapping[str, float] | None) -> Callable[[str, float, int], Run]:
        if lrs is None:
            return lambda cell, lr, seed: plan.tuning_run(cell, lr, plan.then[cell][1], seed)
        return lambda cell, value, seed: plan.tuning_run(cell, lrs[cell], value, seed)

    lr_grids = {cell: list(plan.lrs) for cell in plan.main}
    found.lrs = search(plan, lr_grids, at(None), measure, found.runs)
    lrs = {cell: best(found.lrs[cell]) for cell in plan.main}
    then_grids = {
        cell: sorted({plan.then[cell][1] * factor for factor in (1.0, *plan.factors)}) for cell in plan.main
    }
    found.then = search(plan, then_grids, at(lrs), measure, found.runs)
    found.chosen = {
        cell: dict(zip(plan.tuned(cell), (lrs[cell], best(found.then[cell])), strict=True))
        for cell in plan.main
    }
    return found


def search(
    plan: Plan,
    grids: dict[str, list[float]],
    run_at: Callable[[str, float, int], Run],
    measure: Measure,
    made: list[Run],
) -> dict[str, Grid]:
    """Return the metric at each value of each cell's grid; a grid whose best value is at its edge is
    extended. The runs are added to ``made``, each once."""
    for extension in range(plan.extend + 1):
        longest = max(len(grid) for grid in grids.values())
        runs = [
            run_at(cell, grid[place], seed)
            for seed in plan.tuning_seeds  # the first seed of everything comes first
            for place in range(longest)
            for cell, grid in grids.items()
            if place < len(grid)
        ]
        known = {run.name for run in made}
        made += [run for run in runs if run.name not in known]
        values = measure(runs)
        found = {
            cell: {
                value: [values[run_at(cell, value, seed).name] for seed in plan.tuning_seeds]
                for value in sorted(grid)
            }
            for cell, grid in grids.items()
        }
        longer = {cell: beyond(grid, best(found[cell])) for cell, grid in grids.items()}
        if extension == plan.extend or not any(longer.values()):
            break
        for cell, value in longer.items():
            if value is not None:
                grids[cell].append(value)
    return found


def beyond(grid: Sequence[float], choice: float) -> float | None:
    """Return the next value beyond the edge of ``grid`` if ``choice`` is at it, by the ratio of the two
    values there; None if ``choice`` is not at an edge or the grid has a single value."""
    ordered = sorted(grid)
    if len(ordered) < 2 or choice not in (ordered[0], ordered[-1]):
        return None
    if choice == ordered[-1]:
        return float(f"{ordered[-1] ** 2 / ordered[-2]:.3g}")
    return float(f"{ordered[0] ** 2 / ordered[1]:.3g}")


def best(values: Mapping[float, Sequence[float]]) -> float:
    """Return the tried value with the highest mean; of equal means, the smallest value. Raises ValueError if
    there are none."""
    return min(values, key=lambda tried: (-fmean(values[tried]), tried))


def write_chosen(plan: Plan, chosen: Mapping[str, Settings], path: Path) -> None:
    """Write the file that ``quick`` reads."""
    rule = (
        f"# Written by `python -m study full`: for each cell the learning rate, then the {plan.then_name}, "
        "with the best mean\n"
        f"# {plan.metric} on validation prompts, seeds {list(plan.tuning_seeds)}, by the rule of plan.yaml.\n"
    )
    write_whole(path, rule + yaml.safe_dump({"cells": dict(chosen)}, sort_keys=False))
