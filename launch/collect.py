"""Run folders read back as each run's settings, results and status.

Unfinished runs are included.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from common.errors import DataError, require
from config.load import OPERATIONAL, flat, settings_of
from config.record import RECORD
from launch.composing import Composer
from launch.grid import Run, Settings
from launch.slurm import ROOT
from launch.state import INTERRUPTED, NOT_STARTED, Status, Statuses, ending_of_folder, folder_of, last_line
from reports.metrics import numbers, read_metrics

NO_NUMBERS = ("settings", "fingerprints", "config", "counts")
"""Parts of an evaluation file that say how it was made and on how much data."""


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
    group: str = ""
    tags: tuple[str, ...] = ()

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
    variant = "online" if config.get("online") else "offline"
    variant += "+humanline" if config.get("humanline") else ""
    lines = read_metrics(folder / "metrics.jsonl")
    values: dict[str, float] = {}
    done = (folder / "summary.json").exists()
    if done:
        summary = read_json(folder / "summary.json")
        after: dict[str, Any] = dict(numbers(summary.get("after")))
        values = after | dict(numbers({key: summary.get(key) for key in ("tokens_per_second", "seconds")}))
        last = lines[-1] if lines else last_line(folder)
        lines = [*lines, after | {"step": last.get("step", -1) + 1, "examples": summary.get("examples", 0)}]
    for path in sorted((folder / "evals").glob("*.json")):
        values |= {f"{path.stem}/{key}": float(value) for key, value in numbers(read_json(path), NO_NUMBERS)}
    return Result(
        folder.name,
        cell or default,
        seed,
        ending_of_folder(folder) or Status(INTERRUPTED),
        computed(config),
        values,
        lines,
        f"{config.get('loss.name', '')}-{variant}",
        (*tags, str(config.get("loss.name", "")), variant),
    )


def computed(config: Settings) -> Settings:
    """Return the settings of a flat configuration that change the computation, without the seed."""
    return {key: value for key, value in config.items() if key.split(".")[0] not in (*OPERATIONAL, "seed")}


def read_json(path: Path) -> dict[str, Any]:
    """Return the content of a file that is one JSON object. Raises DataError."""
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise DataError(f"{path} is damaged: {error}. Put it back, or make it again") from error
    if not isinstance(content, dict):
        raise DataError(f"{path} is damaged: it is no JSON object. Put it back, or make it again")
    return content
