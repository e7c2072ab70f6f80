"""The evidence: a plan of sweeps on both embedded tasks and of twelve confirmatory tests, run in the
background for days.

``study/evidence.yaml`` is the plan. Every finished run becomes a line of ``runs.jsonl``, and its folder is
deleted. Runs whose records are in the published file or in the one being written are not done again, so the
same command goes on after it was killed, also in another checkout.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from common.errors import require
from launch.grid import Run, Settings, Sweep
from reports.statistics import SIGNIFICANT
from study.plan import TASKS, Plan, number, parts, read_plan, read_yaml
from study.records import Record, append_record, collect, finished, read_record
from study.runner import RUNS_OF_A_PROCESS, RunsFailedError, run_all

PLAN = Path(__file__).with_name("evidence.yaml")
PUBLISHED = Path(__file__).parents[1] / "docs" / "study" / "evidence" / "runs.jsonl"
DIFFERENT, SAME = "different", "same"
FRESH = 1001
"""The first of the confirmatory tests' seeds, which no other run has."""


@dataclass(frozen=True)
class Test:
    """A confirmatory test of the second cell of its block against the first, two-sided and paired by seed.

    ``kind``: whether it asks if they are ``different``, or the ``same`` within ±``effect``. ``effect``: the
    smallest interesting difference, in points of 100. ``deviation``: the standard deviation of paired
    differences that the number of seeds was planned with, ``measured`` between these two cells of the
    published study.
    """

    claim: str
    held: str
    kind: str
    effect: float
    deviation: float
    measured: tuple[str, str]


@dataclass(frozen=True)
class Block:
    """A sweep of one loss on one task; a confirmatory test's has two cells."""

    part: str
    task: str
    loss: str
    sweep: Sweep
    test: Test | None

    @cached_property
    def runs(self) -> list[Run]:
        return self.sweep.runs()


@dataclass(frozen=True)
class Evidence:
    """The plan, read. ``hours``: part -> CPU hours after which it starts no run. ``seconds``: task ->
    approximate CPU seconds of an ``offline`` and an ``online`` run."""

    blocks: tuple[Block, ...]
    hours: Mapping[str, float]
    seconds: Mapping[str, Mapping[str, float]]

    @property
    def tests(self) -> list[Block]:
        return [block for block in self.blocks if block.test is not None]

    @property
    def level(self) -> float:
        """Holm's first threshold over all confirmatory tests."""
        return SIGNIFICANT / max(1, len(self.tests))

    def runs(self) -> list[tuple[Block, Run]]:
        """Return every run in the order in which they are done: part after part, in each all blocks with one
        seed, then with the next; a test's block is done whole."""
        places = list(self.hours)
        found = [
            ((places.index(block.part), at if block.test else run.seed), block, run)
            for at, block in enumerate(self.blocks)
            for run in sorted(block.runs, key=lambda run: run.seed)
        ]
        return [(block, run) for _, block, run in sorted(found, key=lambda one: one[0])]

    def only(self, names: Sequence[str]) -> Evidence:
        """Return the plan with the blocks of these names or parts alone. Raises ConfigError for another "
        "word."""
        there = {word: None for block in self.blocks for word in (block.part, block.sweep.name)}
        for name in names:
            require(name in there, "--only", name, f"is no part or block; there are {', '.join(there)}")
        return replace(self, blocks=tuple(b for b in self.blocks if {b.part, b.sweep.name} & set(names)))

    def cost(self, block: Block, run: Run) -> float:
        return self.seconds[block.task]["online" if run.settings.get("online") else "offline"]


def read_evidence(path: Path = PLAN) -> Evidence:
    """Raises ConfigError for a part that is missing, unknown or of the wrong type."""
    raw = read_yaml("--plan", path, "is not a file")
    parts(f"{path}", raw, {"seconds": dict, "parts": dict})
    tasks = {task: read_plan(file) for task, file in TASKS.items()}
    blocks: list[Block] = []
    for name, part in raw["parts"].items():
        given = {"settings": {}, "seeds": []} | part
        parts(f"parts.{name}", given, {"hours": object, "settings": dict, "seeds": list, "blocks": dict})
        blocks += [
            _block(name, key, {"seeds": given["seeds"]} | block, given["settings"], tasks)
            for key, block in given["blocks"].items()
        ]
    hours = {name: number(f"parts.{name}.hours", part["hours"]) for name, part in raw["parts"].items()}
    return Evidence(tuple(blocks), hours, raw["seconds"])


def _block(part: str, name: str, raw: Any, shared: Settings, tasks: Mapping[str, Plan]) -> Block:
    """Return a block; ``test`` has the number of seeds of a confirmatory test, beside what ``Test`` says."""
    whole = {"settings": {}, "grid": {}, "test": {}} | raw
    kinds = {
        "task": str,
        "loss": str,
        "settings": dict,
        "cells": dict,
        "grid": dict,
        "seeds": list,
        "test": dict,
    }
    parts(f"{part}.{name}", whole, kinds)
    require(whole["task"] in tasks, f"{name}: task", whole["task"], f"is none of {', '.join(tasks)}")
    plan, test, seeds, cells = tasks[whole["task"]], dict(whole["test"]), whole["seeds"], {}
    if test:
        seeds = range(FRESH, FRESH + test.pop("seeds"))
        require(test["kind"] in (DIFFERENT, SAME), f"{name}: kind", test["kind"], f"is {DIFFERENT} or {SAME}")
        require(len(whole["cells"]) == 2, f"{name}: cells", list(whole["cells"]), "must be two")
    for cell, own in whole["cells"].items():
        like = f"{whole['loss']}-{own.get('like', 'offline')}"
        require(like in plan.main, f"{name}.{cell}: like", like, f"is none of {', '.join(plan.main)}")
        changed = shared | whole["settings"] | {key: value for key, value in own.items() if key != "like"}
        cells[cell] = plan.settings(like) | changed
    grid = tuple(tuple({key: value} for value in values) for key, values in whole["grid"].items())
    sweep = Sweep(name, cells=cells, grid=grid, seeds=tuple(seeds))
    return Block(
        part,
        whole["task"],
        whole["loss"],
        sweep,
        Test(**test | {"measured": tuple(test["measured"])}) if test else None,
    )


def known(plan: Evidence, runs_dir: Path, files: Sequence[Path]) -> dict[str, Record]:
    """Return the records of the plan's runs by name. Raises ConfigError for one with other settings."""
    runs = [run for _, run in plan.runs()]
    return {r.name: r for file in files if file.is_file() for r in collect(runs, runs_dir, file)}


def run_evidence(
    plan: Evidence,
    runs_dir: Path,
    out: Path,
    published: Sequence[Path],
    jobs: int,
    say: Callable[[str], None],
) -> list[str]:
    """Do what is missing, in order, and return the names of runs that failed. Records are appended to
    ``out``/runs.jsonl one by one; those of ``published`` are known too."""
    file = out / "runs.jsonl"
    out.mkdir(parents=True, exist_ok=True)
    runs = plan.runs()
    of = {run.name: run for _, run in runs}
    costs = {run.name: plan.cost(block, run) for block, run in runs}

    def keep(name: str) -> None:
        append_record(file, read_record(of[name], runs_dir / name))
        shutil.rmtree(runs_dir / name)

    for name in of:  # finished just before an earlier start was killed
        if finished(runs_dir / name):
            keep(name)
    failed: list[str] = []
    while chunk := _next(plan, there := known(plan, runs_dir, (*published, file)), failed, jobs):
        say(told(plan, there, failed))
        try:
            run_all(chunk, runs_dir, jobs, lambda run: costs[run.name], keep)
        except RunsFailedError as error:
            failed += error.names
    say(told(plan, there, failed))
    return failed


def _next(plan: Evidence, there: Mapping[str, Record], failed: Sequence[str], jobs: int) -> list[Run]:
    """Return the next runs: as many as a process does, of one part, within its hours."""
    spent, slower = spent_hours(plan, there), pace(plan, there)
    found: list[Run] = []
    part = ""
    for block, run in plan.runs():
        hours = slower * plan.cost(block, run) / 3600
        if run.name in there or run.name in failed or spent[block.part] + hours > plan.hours[block.part]:
            continue
        if len(found) == jobs * RUNS_OF_A_PROCESS or block.part != (part or block.part):
            break
        part = block.part
        spent[part] += hours
        found.append(run)
    return found


def spent_hours(plan: Evidence, there: Mapping[str, Record]) -> dict[str, float]:
    """Return part -> CPU hours of its records."""
    spent = dict.fromkeys(plan.hours, 0.0)
    for block, run in plan.runs():
        if run.name in there:
            spent[block.part] += there[run.name].seconds["cpu"] / 3600
    return spent


def pace(plan: Evidence, there: Mapping[str, Record]) -> float:
    """Return how many times the planned CPU seconds the runs have taken so far; 1 before the first."""
    done = [
        (plan.cost(b, run), there[run.name].seconds["cpu"]) for b, run in plan.runs() if run.name in there
    ]
    return sum(taken for _, taken in done) / sum(planned for planned, _ in done) if done else 1.0


def told(plan: Evidence, there: Mapping[str, Record], failed: Sequence[str] = ()) -> str:
    """Return how far the runs are, by part, with the CPU time left: what the plan expects, at most the part's
    hours."""
    spent, slower, lines, left = spent_hours(plan, there), pace(plan, there), [], 0.0
    for part, hours in plan.hours.items():
        runs = [(block, run) for block, run in plan.runs() if block.part == part]
        missing = slower * sum(plan.cost(block, run) for block, run in runs if run.name not in there) / 3600
        left += (now := max(0.0, min(missing, hours - spent[part])))
        done = sum(run.name in there for _, run in runs)
        lines.append(
            f"{part} {done} of {len(runs)} runs, {spent[part]:.2f} of at most {hours:g} CPU hours, "
            f"{now:.1f} left"
        )
    without = f"; failed: {', '.join(failed)}" if failed else ""
    return f"The evidence, about {left:.1f} CPU hours left: {'; '.join(lines)}{without}"
