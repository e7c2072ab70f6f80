"""Run folders read back as each run's settings, results and status, unfinished runs included, and the rows of
a results table, each with the runs of the chosen setting, which differ by their seed alone."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from common.errors import DataError, require
from common.files import read_object
from config.load import OPERATIONAL, RECORD, flat, settings_of
from launch.grid import Run, Settings, unselected
from launch.slurm import ROOT
from launch.state import (
    INTERRUPTED,
    NOT_STARTED,
    Composer,
    Status,
    Statuses,
    ending_of_folder,
    folder_of,
    last_line,
)
from reports.metrics import numbers, read_metrics
from reports.outcome import FINISHED
from reports.statistics import SeedMean, mean

NO_NUMBERS = ("settings", "fingerprints", "config", "counts")
"""Parts of an evaluation file that say how it was made and on how much data."""
BACK = "; put it back, or make it again"


@dataclass(frozen=True)
class Result:
    """One run. ``values``: the measurements of a finished run; empty before it has finished."""

    name: str
    cell: str
    seed: int
    about: Status
    """The run's status, with its message and log."""
    settings: Settings = field(default_factory=dict)
    """Dotted key -> value of the settings that change the computation, without the seed."""
    values: dict[str, float] = field(default_factory=dict)
    """``eval_*`` on held-out data (validation), and ``<file>/<metric>`` of each evals/*.json file."""
    lines: list[dict[str, Any]] = field(default_factory=list)
    """The lines of metrics.jsonl; a finished run has one more, with the evaluation after training."""
    tags: tuple[str, ...] = ()
    """``wandb.tags``: of a sweep's run its sweep and its cell."""

    @property
    def status(self) -> str:
        """One of the words of launch.state."""
        return self.about.kind

    def identity(self, without: Iterable[str] = ()) -> str:
        """Return a hash of the settings without some keys: runs with the same one differ only in their seed
        and those keys."""
        kept = {key: value for key, value in self.settings.items() if key not in set(without)}
        return hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()[:6]

    @property
    def step(self) -> int:
        """Number of steps done."""
        return max((line["step"] + 1 for line in self.lines if "loss" in line), default=0)


def of_sweep(runs: Iterable[Run], logs: Path) -> list[Result]:
    """Return the results of a sweep's runs, including runs without a folder. ``logs``: the sweep's log
    folder."""
    results, composer, statuses = [], Composer(), Statuses(logs)
    for run in runs:
        composed = composer.config(run)
        folder = folder_of(composed, run)
        if (folder / RECORD).exists():
            result = read_run(folder, run.cell)
        else:
            config = flat(asdict(composed))
            result = Result(run.name, run.cell, run.seed, Status(NOT_STARTED), computed(config))
        results.append(replace(result, about=statuses.of(run.name, folder)))
    return results


def of_folders(paths: Iterable[Path], logs: Path = ROOT / "logs") -> list[Result]:
    """Return the results under ``paths``, each a run folder or a folder of run folders.

    ``logs``: the folder with the log folders of sweeps; a run's first tag names its sweep. Raises ConfigError
    if a path holds no run.
    """
    results: list[Result] = []
    seen: set[Path] = set()
    statuses_of = cache(lambda sweep: Statuses(logs / sweep))
    for path in paths:
        records = [path / RECORD] if (path / RECORD).exists() else sorted(path.glob("*/config.yaml"))
        require(bool(records), "runs", path, "is no run folder and holds none")
        for record in records:
            if (folder := record.parent.resolve()) in seen:
                continue
            seen.add(folder)
            run = read_run(record.parent.absolute())  # "." has no name
            if run.cell in run.tags[1:2]:  # a run of a sweep, as launch.grid tags them
                run = replace(run, about=statuses_of(run.tags[0]).of(run.name, record.parent))
            results.append(run)
    return results


def read_run(folder: Path, cell: str | None = None) -> Result:
    """Read one run folder; the status is judged by the folder alone.

    Without ``cell``, the cell is the name that the run's sweep gave it (its second tag), or the run's name
    without the seed.
    """
    config = flat(settings_of((folder / RECORD).read_text(encoding="utf-8", errors="replace")))
    if not isinstance(seed := config.get("seed"), int):
        raise DataError(f"{folder / RECORD} is damaged: it has no seed. Put it back, or leave {folder} out")
    tags = tuple(config.get("wandb.tags") or ())
    of_sweep = len(tags) > 1 and folder.name == f"{tags[1]}-s{seed}"
    default = tags[1] if of_sweep else folder.name.removesuffix(f"-s{seed}")
    lines = read_metrics(folder / "metrics.jsonl")
    values: dict[str, float] = {}
    done = (folder / "summary.json").exists()
    if done:
        summary = read_object(folder / "summary.json", BACK)
        after: dict[str, Any] = dict(numbers(summary.get("after")))
        values = after | dict(numbers({key: summary.get(key) for key in ("tokens_per_second", "seconds")}))
        last = lines[-1] if lines else last_line(folder)
        lines = [*lines, after | {"step": last.get("step", -1) + 1, "examples": summary.get("examples", 0)}]
    for path in sorted((folder / "evals").glob("*.json")):
        found = numbers(read_object(path, BACK), NO_NUMBERS)
        values |= {f"{path.stem}/{key}": float(value) for key, value in found}
    return Result(
        folder.name,
        cell or default,
        seed,
        ending_of_folder(folder) or Status(INTERRUPTED),
        computed(config),
        values,
        lines,
        tags,
    )


def computed(config: Settings) -> Settings:
    """Return the settings of a flat configuration that change the computation, without the seed."""
    return {key: value for key, value in config.items() if key.split(".")[0] not in (*OPERATIONAL, "seed")}


# -- rows of a table -------------------------------------------------------------------------------


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
