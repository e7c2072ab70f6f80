"""What a run's folder says about its run: whether it is a run's folder, whether the run has begun, and its
settings."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from common.errors import ConfigError
from common.files import read_sealed, regular_file
from config.files import section
from config.load import Change, changed, check_version, settings_of
from config.schema import Config

MARKER = "run.json"
"""The file that marks a folder as a run's; written before anything else."""
RECORD = "config.yaml"
"""The settings of the run; written once weights and data are loaded."""
LOCK = "run.lock"
"""Held by the process that is working in the folder (common.lock)."""
KIND = "humanline run"
MAY_CHANGE = section("reads.yaml")["may_change"].split()
"""Settings that may differ when a run is resumed. They change what is measured or kept, which machines
sample, how weights reach them or how long they stay gathered, but not what is trained."""
_SECTIONS = {"model", "data", "loss", "trainer", "runs_dir"}


def marked(folder: Path) -> bool:
    """Return whether ``folder`` has the marker of a run: texts, and lists of notes, as they were written."""
    try:
        about = read_sealed(folder / MARKER)
    except (OSError, ValueError):
        return False
    if not isinstance(about, dict) or about.get("kind") != KIND:
        return False
    lists = [value for value in about.values() if not isinstance(value, str)]
    return all(isinstance(value, list) and all(isinstance(one, dict) for one in value) for value in lists)


def unmarked_run(folder: Path) -> bool:
    """Return whether ``folder`` has a run's settings but no marker, or a damaged one."""
    return not marked(folder) and settings_of(_record(folder)).keys() >= _SECTIONS


def started(folder: Path) -> bool:
    """Return whether ``folder`` holds a run that can be resumed: a checkpoint, a logged step, or a finished
    run.

    A start that was refused leaves none of these. A run that lost its marker counts as started.
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
    """Return the settings that the run in ``folder`` was started with, as plain data; {} if there is no
    record of them. Raises ConfigError for a damaged record, and for one of another version."""
    if not (folder / RECORD).exists():
        return {}
    text = _record(folder)
    before = settings_of(text)
    if not before.keys() >= _SECTIONS:
        raise ConfigError(
            "exp_name",
            folder.name,
            f"{folder / RECORD} is damaged: settings are missing. Put it back; or delete that file, and "
            "resume=true "
            "goes on with the settings of the command line, which must be those that the run was started "
            "with",
        )
    check_version(text, folder)
    return before


def changes(folder: Path, config: Config) -> list[Change]:
    """Return the settings that differ between the start of the run in ``folder`` and ``config`` and that
    change what is computed. The list is empty if there is no record of the run's settings.

    Raises ConfigError for a damaged record, and for one of another version.
    """
    before = settings_before(folder)
    return changed(before, config) if before else []


def refused_changes(made: Iterable[Change]) -> list[Change]:
    """Return those of ``made`` (by ``changes``) with which the run cannot be resumed."""
    return [other for other in made if other.key not in MAY_CHANGE]


def _record(folder: Path) -> str:
    """Return the text of the record; empty if there is no readable record."""
    try:
        return regular_file(folder / RECORD).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""
