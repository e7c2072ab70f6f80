"""The progress of a sweep's run, judged by its folder and settings, before anything is started."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import ConfigError, UserError
from config.load import Change
from config.record import changes, refused_changes, started
from config.schema import Config
from launch.composing import Composer
from launch.grid import CONFIG_DIR, Run

FINISHED, PARTIAL, NEW, CHANGED = "finished", "unfinished", "new", "settings changed"


@dataclass(frozen=True)
class State:
    """Where a run stands. ``kind`` is FINISHED (nothing to do), PARTIAL (goes on), NEW, or CHANGED
    (refused)."""

    run: Run
    config: Config
    kind: str
    detail: str = ""
    change: Change | None = None
    """For CHANGED: the setting that differs from the run's own."""

    @property
    def folder(self) -> Path:
        return folder_of(self.config, self.run)


def folder_of(config: Config, run: Run) -> Path:
    """Return the run's folder; a relative runs_dir is relative to the repository, where runs are started."""
    return CONFIG_DIR.parent / config.runs_dir / run.name


def check_ranks(config: Config, run: Run, ranks: int) -> None:
    """Raise ConfigError unless a batch divides into ranks x microbatches; train.py would notice this
    only on the cluster."""
    parts = config.model.microbatches * ranks
    if config.model.batch_size % parts:
        raise ConfigError(
            f"{run.name}: model.batch_size",
            config.model.batch_size,
            f"does not divide into {ranks} ranks x {config.model.microbatches} microbatches: use a smaller "
            "model.microbatches, or fewer nodes or GPUs (--set nodes=…, --set "
            "gpus_per_node=…)",
        )


def inspect(run: Run, composer: Composer | None = None) -> State:
    """Return the state of ``run``; for many runs, pass the same ``composer`` to all calls.

    Raises UserError if the run's settings are not valid.
    """
    try:
        config = (composer or Composer()).config(run)
    except ConfigError as error:
        raise ConfigError(f"{run.name}: {error.key}", error.value, error.remedy) from error
    except UserError as error:
        raise UserError(f"{run.name}: {error}") from error
    folder = folder_of(config, run)
    begun = started(folder)
    differences = changes(folder, config) if begun else []
    if others := refused_changes(differences):
        return State(run, config, CHANGED, told(others[0]), others[0])
    if (folder / "summary.json").exists():
        return State(run, config, FINISHED)
    last = last_line(folder)
    return State(run, config, PARTIAL if begun else NEW, f"step {last['step']}" if "step" in last else "")


def told(other: Change) -> str:
    """Return a changed setting in words."""
    return f"{other.key}: {other.before} there, {other.now} here"


def last_line(folder: Path) -> dict[str, Any]:
    """Return the last whole line of a run's metrics.jsonl; {} without one."""
    path = folder / "metrics.jsonl"
    if not path.exists():
        return {}
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 65536))
        whole = file.read().rpartition(b"\n")[0].splitlines()
    try:
        metrics = json.loads(whole[-1]) if whole else {}
    except ValueError:  # damaged: the run itself will report it when it goes on
        return {}
    return metrics if isinstance(metrics, dict) else {}


def tail(path: Path, lines: int = 15) -> list[str]:
    """Return the last lines of a log, with a progress bar cut to its last state; [] without the file."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 65536))
        text = file.read().decode(errors="replace")
    return [line.rstrip("\r").rsplit("\r", 1)[-1] for line in text.split("\n")[:-1]][-lines:]
