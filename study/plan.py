"""The study's plans: sweeps on its tasks, by part, and confirmatory tests.

``study/evidence.yaml``, ``paper.yaml`` and ``constraints.yaml`` are plans. Nothing about a run is decided
elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from common.errors import require
from launch.grid import Run, Settings, Sweep
from reports.statistics import SIGNIFICANT
from study.records import Record, collect, command
from study.tasks import FOLDERS, TITLES, Task, number, parts, read_task, read_yaml

PLANS = {name: Path(__file__).with_name(f"{name}.yaml") for name in ("paper", "evidence", "constraints")}
_DOCS = Path(__file__).parents[1] / "docs" / "study"
PUBLISHED = {
    "paper": [_DOCS / "paper" / f"{title}.jsonl" for title in ("sums", "stories")],
    "evidence": [_DOCS / "evidence" / "runs.jsonl"],
    "constraints": [_DOCS / "constraints" / "runs.jsonl"],
}
MAIN = "main"
DIFFERENT, SAME = "different", "same"
FRESH = 1001
"""The first of the confirmatory tests' seeds, which no other run has."""

Values = Mapping[str, Mapping[int, float]]
"""Cell -> seed -> points of 100: sampled accuracy, or true reward."""


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
    """A sweep of one loss on one task; a confirmatory test's has two cells. ``like``: cell -> the cell of its
    task whose settings it has but for its changes."""

    part: str
    task: str
    loss: str
    sweep: Sweep
    like: Mapping[str, str]
    test: Test | None
    kept: frozenset[int] = frozenset()
    """seeds whose runs keep their folder, with the trained weights"""

    @cached_property
    def runs(self) -> list[Run]:
        return self.sweep.runs()

    @property
    def kind(self) -> str:
        """The first word of its name, ``surface``, ``lag`` …, by which the page knows what to show."""
        return self.sweep.name.partition("-")[0]


@dataclass(frozen=True)
class Plan:
    """A plan, read. ``hours``: part -> CPU hours after which it starts no run. ``seconds``: task ->
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
        keyed_runs = [
            ((places.index(block.part), at if block.test else run.seed), block, run)
            for at, block in enumerate(self.blocks)
            for run in sorted(block.runs, key=lambda run: run.seed)
        ]
        return [(block, run) for _, block, run in sorted(keyed_runs, key=lambda one: one[0])]

    def distinct_runs(self) -> list[tuple[Block, Run]]:
        """Return ``runs`` without those that repeat an earlier one's settings, whose record is theirs."""
        first: dict[frozenset[str], tuple[Block, Run]] = {}
        for block, run in self.runs():
            first.setdefault(frozenset(command(run)), (block, run))
        return list(first.values())

    def only(self, names: Sequence[str]) -> Plan:
        """Return the plan with the blocks of these names, parts or tasks alone. Raises ConfigError for
        another word."""
        words = {
            block.sweep.name: {block.part, TITLES[block.task], block.sweep.name} for block in self.blocks
        }
        there = sorted(set().union(*words.values()))
        for name in names:
            require(name in there, "--only", name, f"is no part, task or block; there are {', '.join(there)}")
        return replace(self, blocks=tuple(b for b in self.blocks if words[b.sweep.name] & set(names)))

    def with_seeds(self, seeds: Sequence[int]) -> Plan:
        """Return the plan with other seeds. Raises ConfigError for a test, whose seeds were planned."""
        tests = ", ".join(block.sweep.name for block in self.tests)
        require(
            not tests,
            "--seeds",
            list(seeds),
            f"is not for {tests}, whose seeds are planned: leave it out (--only)",
        )
        blocks = (replace(b, sweep=replace(b.sweep, seeds=tuple(seeds))) for b in self.blocks)
        return replace(self, blocks=tuple(blocks))

    def of_kind(self, kind: str) -> list[Block]:
        return [block for block in self.blocks if block.kind == kind and block.test is None]

    def base(self, block: Block, at: Sequence[str]) -> str:
        """Return the cell with which the block's cell ``at`` (its place on each axis) is compared: what it is
        like in the part ``main`` (``offline-hl`` for ``offline-hl-k4``), or else the block's first one at the
        same point of the grid; a block with plain training of its own is always compared with that."""
        for main in self.of_kind(MAIN):
            whole = next(iter(main.sweep.cells)) in block.sweep.cells
            if not whole and (main.task, main.loss) == (block.task, block.loss):
                alike = [cell for cell in main.sweep.cells if block.like[at[0]].startswith(cell)]
                if alike:
                    return f"{main.sweep.name}-{max(alike, key=len)}"
        return "-".join((block.sweep.name, next(iter(block.sweep.cells)), *at[1:]))

    def cost(self, block: Block, run: Run) -> float:
        return self.seconds[block.task]["online" if run.settings.get("online") else "offline"]


def read_plan(path: Path) -> Plan:
    """Raises ConfigError for a part that is missing, unknown or of the wrong type."""
    raw = read_yaml("plan", path, "is neither a plan of the study nor a file")
    parts(f"{path}", raw, {"seconds": dict, "parts": dict})
    for task in raw["seconds"]:
        parts(f"seconds.{task}", raw["seconds"][task], dict.fromkeys(("offline", "online"), int))
    parts("parts", raw["parts"], dict.fromkeys(raw["parts"], dict))
    tasks = {task: read_task(folder) for task, folder in FOLDERS.items()}
    blocks: list[Block] = []
    for name, part in raw["parts"].items():
        given = {"settings": {}, "seeds": [], "tuned": False, "keep": []} | part
        kinds = {"hours": object, "settings": dict, "seeds": list, "tuned": bool, "keep": list}
        parts(f"parts.{name}", given, kinds | {"blocks": dict})
        parts(f"parts.{name}.blocks", given["blocks"], dict.fromkeys(given["blocks"], dict))
        blocks += [
            _block(name, key, {"seeds": given["seeds"]} | block, given, tasks)
            for key, block in given["blocks"].items()
        ]
    for one in blocks:
        have = ", ".join(raw["seconds"])
        require(
            one.task in raw["seconds"], f"{one.sweep.name}: task", one.task, f"has no seconds; {have} have"
        )
    hours = {name: number(f"parts.{name}.hours", part["hours"]) for name, part in raw["parts"].items()}
    return Plan(tuple(blocks), hours, raw["seconds"])


def _block(part: str, name: str, raw: Any, shared: Settings, tasks: Mapping[str, Task]) -> Block:
    """Return a block. ``shared``: its part's ``settings``, whether its cells have ``tuned`` ones, and the
    seeds that it should ``keep``. ``test`` has the number of a confirmatory test's seeds, beside what
    ``Test`` says."""
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
    parts(f"{name}: cells", whole["cells"], dict.fromkeys(whole["cells"], dict))
    parts(f"{name}: grid", whole["grid"], dict.fromkeys(whole["grid"], list))
    require(whole["task"] in tasks, f"{name}: task", whole["task"], f"is none of {', '.join(tasks)}")
    task, loss = tasks[whole["task"]], whole["loss"]
    test, seeds, cells, like = dict(whole["test"]), whole["seeds"], {}, {}
    if test:
        of_test = {"claim": str, "held": str, "kind": str, "effect": object, "deviation": object}
        parts(f"{name}: test", test, of_test | {"measured": list, "seeds": int})
        seeds = range(FRESH, FRESH + test.pop("seeds"))
        require(test["kind"] in (DIFFERENT, SAME), f"{name}: kind", test["kind"], f"is {DIFFERENT} or {SAME}")
        require(len(whole["cells"]) == 2, f"{name}: cells", list(whole["cells"]), "must be two")
    for cell, own in whole["cells"].items():
        like[cell] = own.get("like", cell if f"{loss}-{cell}" in task.cells else "offline")
        whose = f"{loss}-{like[cell]}"
        require(whose in task.cells, f"{name}.{cell}: like", whose, f"is none of {', '.join(task.cells)}")
        changes = {key: value for key, value in own.items() if key != "like"}
        changed = shared["settings"] | whole["settings"] | changes
        cells[cell] = task.settings(whose, shared["tuned"]) | changed
    grid = tuple(tuple({key: value} for value in values) for key, values in whole["grid"].items())
    sweep = Sweep(name, cells=cells, grid=grid, seeds=tuple(seeds))
    asked = Test(**test | {"measured": tuple(test["measured"])}) if test else None
    return Block(part, whole["task"], loss, sweep, like, asked, frozenset(shared["keep"]))


def known(plan: Plan, runs_dir: Path, files: Sequence[Path]) -> dict[str, Record]:
    """Return the records of the plan's runs by name. Raises ConfigError for one with other settings."""
    runs = [run for _, run in plan.runs()]
    return {r.name: r for file in files if file.is_file() for r in collect(runs, runs_dir, file)}


def spent_hours(plan: Plan, there: Mapping[str, Record]) -> dict[str, float]:
    """Return part -> CPU hours of its records."""
    spent = dict.fromkeys(plan.hours, 0.0)
    for block, run in plan.distinct_runs():
        if run.name in there:
            spent[block.part] += there[run.name].seconds["cpu"] / 3600
    return spent


def pace(plan: Plan, there: Mapping[str, Record]) -> float:
    """Return how many times the planned CPU seconds the runs have taken so far; 1 before the first."""
    runs = plan.distinct_runs()
    done = [(plan.cost(b, run), there[run.name].seconds["cpu"]) for b, run in runs if run.name in there]
    return sum(taken for _, taken in done) / sum(planned for planned, _ in done) if done else 1.0


def told(plan: Plan, there: Mapping[str, Record], failed: Sequence[str] = ()) -> str:
    """Return how far the runs are, by part, with the CPU time left: what the plan expects, at most the part's
    hours."""
    spent, slower, lines, left = spent_hours(plan, there), pace(plan, there), [], 0.0
    for part, hours in plan.hours.items():
        runs = [(block, run) for block, run in plan.distinct_runs() if block.part == part]
        if not runs:  # left out (--only)
            continue
        missing = slower * sum(plan.cost(block, run) for block, run in runs if run.name not in there) / 3600
        left += (now := max(0.0, min(missing, hours - spent[part])))
        done = sum(run.name in there for _, run in runs)
        lines.append(
            f"{part} {done} of {len(runs)} runs, {spent[part]:.2f} of at most {hours:g} CPU hours, "
            f"{now:.1f} left"
        )
    without = f"; failed: {', '.join(failed)}" if failed else ""
    return f"About {left:.1f} CPU hours left: {'; '.join(lines)}{without}"
