"""What a run's folder says of its run: whether it is a run's folder, whether the run has begun, and with what
settings."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from common.errors import ConfigError
from config.load import Change, changed, settings_of
from config.schema import Config

MARKER = "run.json"
"""Makes a folder a run's; written before anything else."""
RECORD = "config.yaml"
"""The settings of the run; written once weights and data are loaded."""
LOCK = "run.lock"
"""Held by the process that is at work in the folder (common.lock)."""
KIND = "humanline run"
MAY_CHANGE = ("eval_every", "rounds.compress", "rounds.keep_weights", "sampler.urls", "sampler.adapters")
"""Settings that a run may go on with others of: they change what is measured or kept, which machines sample
or how weights reach them, and not what is trained."""
LENGTH = ("n_epochs", "n_examples")
"""What says how long an offline run is."""
_SECTIONS = {"model", "data", "loss", "trainer", "runs_dir"}


def marked(folder: Path) -> bool:
    """Whether ``folder`` has the marker of a run."""
    try:
        about = json.loads((folder / MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(about, dict) and about.get("kind") == KIND


def unmarked_run(folder: Path) -> bool:
    """Whether ``folder`` is that of a run of an earlier version: without a marker, but with a run's
    settings."""
    return not marked(folder) and settings_of(_record(folder)).keys() >= _SECTIONS


def started(folder: Path) -> bool:
    """Whether there is a run in ``folder`` to go on with: a checkpoint, a step, or the end of a run.

    A start that was refused leaves none of them. A run of an earlier version counts as started.
    """
    metrics = folder / "metrics.jsonl"
    return (
        (folder / "summary.json").exists()
        or (folder / "model").exists()
        or any((folder / "checkpoints").glob("step_*[0-9]"))
        or (metrics.is_file() and metrics.stat().st_size > 0)
        or unmarked_run(folder)
    )


def settings_before(folder: Path) -> dict[str, Any]:
    """The settings that the run in ``folder`` was started with, as plain data; {} where there is no record of
    them. Raises ConfigError for a record that is damaged."""
    if not (folder / RECORD).exists():
        return {}
    before = settings_of(_record(folder))
    if not before.keys() >= _SECTIONS:
        raise ConfigError(
            "exp_name",
            folder.name,
            f"{folder / RECORD} is damaged: settings are missing. Put it back; or delete that file, and "
            "resume=true "
            "goes on with the settings of the command line, which must be those that the run was started "
            "with",
        )
    return before


def changes(folder: Path, config: Config) -> list[Change]:
    """The settings that differ between those that the run in ``folder`` was started with and ``config``, and
    change what is computed. None if there is no record of them.

    Raises ConfigError for a record that is damaged.
    """
    before = settings_before(folder)
    return changed(before, config) if before else []


def may_be_longer(config: Config) -> bool:
    """Whether a run with these settings may be made longer: its learning rate is where it ended."""
    return not config.online and config.scheduler == "constant" and config.data.logprob_range is None


def refused_changes(found: Iterable[Change], config: Config) -> list[Change]:
    """Those of ``found`` (``changes``) that the run cannot go on with. How much longer it may be made is
    known only once the data are loaded (``jobs.lengths``)."""
    longer = LENGTH if may_be_longer(config) else ()
    return [other for other in found if other.key not in (*MAY_CHANGE, *longer)]


def _record(folder: Path) -> str:
    """The text of the record; empty where there is none that can be read."""
    try:
        return (folder / RECORD).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""
