"""The folder of a run, with the checks of its owner, its lock, and what may be written and deleted there."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any
from uuid import uuid4

from common.errors import ConfigError
from common.files import (
    check_name,
    on_disk,
    part_of,
    read_json,
    read_sealed,
    sealed,
    write_if_changed,
    write_whole,
)
from common.lock import FileLock, LockedError
from config.load import (
    ABSENT,
    KIND,
    LOCK,
    MARKER,
    RECORD,
    changes,
    dump,
    marked,
    refused_changes,
    started,
    texts,
    unmarked_run,
)
from config.schema import Config

LOGS = "logs"
"""Folder of the logs of a run's processes. overwrite=true keeps it, as they may still be writing to it."""
SELECTION = "selection.json"
"""File of the groups that are trained on (jobs.initial_scores), chosen before the first step."""
INPUTS = "inputs"
"""Key of the fingerprints in a checkpoint's state, and of the run's id there."""


class RunFolder:
    """The folder of one run. Only rank 0 calls its methods, in this order: ``claim``, ``prepare``, ``write``,
    ``release``.

    All of them raise ConfigError, also when the file system refuses an operation.
    """

    def __init__(self, config: Config, name: str) -> None:
        self.config, self.name = config, name
        self.path = Path(config.runs_dir) / name
        self._claimed_empty = False

    @cached_property
    def _lock(self) -> FileLock:
        return FileLock(self.path / LOCK)

    def check(self) -> None:
        """Raise ConfigError where ``claim`` would refuse the folder as it is now. Writes nothing."""
        check_name("exp_name", self.name)
        with self._refusals():
            self._check_folder()

    def claim(self) -> None:
        """Create the folder, lock it until ``release``, and mark it as a run's; its contents stay untouched.

        Raises ConfigError for a folder that is not a run's; for an existing run, unless overwrite or resume
        says what to do with it; for a run that was started with other settings; and for a run that another
        process is working in.
        """
        self.check()  # before anything is written into a folder that may not be a run's
        with self._refusals():
            try:
                self._lock.acquire()
            except LockedError as holder:
                raise ConfigError(
                    "exp_name",
                    self.name,
                    f"{self.path} is in use by {holder}; wait for its end, or exp_name=… names another run",
                ) from holder
            try:
                self._check_folder()  # again, because another process may have changed it before the lock
                self._mark()
            except BaseException:
                self._lock.release()
                raise
        self._lock.sign()
        if self._lock.problem:
            print(
                f"{self.path}: its file system has no locks ({self._lock.problem}): see to it that no other "
                "process trains in this folder",
                flush=True,
            )

    def prepare(self) -> bool:
        """Prepare the folder for training, once weights and data are loaded.

        With overwrite=true the run in it is deleted here. Then the settings are written. Returns whether
        there is a run to resume.
        """
        with self._refusals():
            exists = started(self.path)
            if exists and self.config.overwrite:
                self._delete_run()
                exists = False
            if not exists:  # a failed start with other settings may have left the file
                (self.path / SELECTION).unlink(missing_ok=True)
        self.write(RECORD, dump(self.config))
        return exists

    def write(self, name: str, text: str) -> None:
        """Write a file of the run atomically, unless it already has this text."""
        with self._refusals():
            write_if_changed(self.path / name, text)

    def release(self) -> None:
        """Release the lock. A new folder in which no run was started is removed."""
        if self._claimed_empty and not started(self.path) and self._entries() <= {MARKER}:
            (self.path / MARKER).unlink(missing_ok=True)
            self._lock.release(remove=True)
            try:
                self.path.rmdir()
            except OSError:  # another process has just claimed the folder
                return
        self._lock.release()

    # -- what is there -----------------------------------------------------------------------------

    def _entries(self) -> set[str]:
        """Return the names of the folder's entries, except the lock and a partly written marker."""
        ignored = {LOCK, part_of(self.path / MARKER).name}
        return {entry.name for entry in self.path.iterdir()} - ignored if self.path.exists() else set()

    def _check_folder(self) -> None:
        """Raise ConfigError unless the folder may be used as the settings say. Writes nothing."""
        config, path = self.config, self.path
        is_run = not self._entries() or marked(path) or unmarked_run(path)
        if not is_run:
            raise ConfigError(
                "exp_name",
                self.name,
                f"{path} is there already and is not the folder of a run (it has no {MARKER}): nothing is "
                "written or deleted there; exp_name=… names another",
            )
        if not started(path):
            return
        if not config.resume and not config.overwrite:
            raise ConfigError(
                "exp_name",
                self.name,
                f"{path} is there already; resume=true goes on with it, overwrite=true deletes it, "
                "exp_name=… names another",
            )
        if config.overwrite:
            self._check_deletion()
        else:
            self._check_changes()

    def _check_changes(self) -> None:
        """Raise ConfigError for changed settings with which the run cannot be resumed."""
        path = self.path
        refused = refused_changes(changes(path, self.config))
        if not refused:
            return
        first, *others = refused
        also = "".join(f"; {other.key}={other.now} was {other.before}" for other in others)
        typed = " ".join(f"{change.key}={change.before}" for change in refused)
        goes_on = "" if any(ABSENT in change for change in refused) else f"{typed} goes on, "
        further = f"; to train further, start another run from its model (model.name_or_path={path})"
        further = further if first.key in ("n_epochs", "n_examples") else ""
        raise ConfigError(
            first.key,
            first.now,
            f"was {first.before} when the run in {path} was started{also}, and a run goes on with its "
            f"settings{further}: {goes_on}exp_name=… starts another run",
        )

    def _check_deletion(self) -> None:
        """Raise ConfigError unless the folder holds one run and nothing else."""
        path = self.path
        rest = "delete it by hand, or exp_name=… names another"
        link = f"{path} is a link, and nothing is deleted through a link; {rest}"
        if path.is_symlink():
            raise ConfigError("overwrite", True, link)
        if not marked(path):
            raise ConfigError("overwrite", True, f"{path} has no {MARKER} to say that it is a run's; {rest}")
        for key, value in texts(asdict(self.config)):
            if "\0" not in value and Path(value).resolve().is_relative_to(path.resolve()):
                raise ConfigError(
                    key,
                    value,
                    f"lies in {path}, which overwrite=true would delete; exp_name=… names another run",
                )
        inner = next((marker for marker in path.rglob(MARKER) if marker.parent != path), None)
        if inner is not None:
            raise ConfigError(
                "overwrite",
                True,
                f"{path} holds another run ({inner and inner.parent}); move that elsewhere, or exp_name=… "
                "names another",
            )

    # -- changes -----------------------------------------------------------------------------------

    def _mark(self) -> None:
        """Mark the folder as a run's, unless it is already marked. A damaged marker is kept beside it."""
        if marked(self.path):
            return
        damaged = self.path / f"{MARKER}.damaged"
        with suppress(FileNotFoundError):
            (self.path / MARKER).rename(damaged)
            print(f"{damaged}: {MARKER} was damaged; what it noted of inputs is here now", flush=True)
        self._claimed_empty = not self._entries()
        self._begin(recorded(self.path).get("run"))

    def _begin(self, run: str | None = None) -> None:
        """Write the marker, of a new run unless ``run`` is the id of the one that is there."""
        about = {
            "kind": KIND,
            "run": run or uuid4().hex,
            "name": self.name,
            "created": datetime.now().astimezone().isoformat(timespec="seconds"),
            "note": "made by train.py; overwrite=true deletes what is in this folder",
        }
        write_whole(self.path / MARKER, sealed(about))

    def _delete_run(self) -> None:
        """Delete everything in the folder except lock, marker and logs, checkpoints first and settings last.

        So if the process is killed meanwhile, the folder is still a run's, and never has checkpoints without
        their settings.
        """
        self._check_deletion()
        kept = {LOCK, MARKER, LOGS}
        entries = sorted(
            self.path.iterdir(), key=lambda e: (e.name == RECORD, e.name != "checkpoints", e.name)
        )
        for entry in entries:
            if entry.name in kept:
                continue
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()
        self._begin()
        print(f"{self.path}: the run that was there is deleted (overwrite=true)", flush=True)

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        """Turn an OSError inside the context into a ConfigError."""
        try:
            yield
        except OSError as error:
            raise ConfigError(
                "runs_dir",
                self.config.runs_dir,
                f"{error.filename or self.path}: {error.strerror or error} {on_disk(self.path)}; make room "
                "there, or name a folder to write in",
            ) from error


def run_id(folder: Path) -> str | None:
    """Return the id of the run in ``folder``; None for a run that began before runs had one."""
    return read_sealed(folder / MARKER).get("run")


def states(folder: Path) -> list[tuple[Path, dict[str, Any], int]]:
    """Return (checkpoint, its fingerprints, its step) of each checkpoint of the run whose state can be read,
    the newest first."""
    found = []
    for path in sorted((folder / "checkpoints").glob("step_*[0-9]/state.json"), reverse=True):
        with suppress(OSError, ValueError, LookupError, TypeError):  # the run passes over a damaged one
            state = read_json(path)
            found.append((path.parent, dict(state[INPUTS]), int(state["progress"]["step"])))
    return found


def recorded(folder: Path) -> dict[str, Any]:
    """Return the fingerprints in the newest checkpoint that can be read; {} if none can."""
    return next((inputs for _, inputs, _ in states(folder)), {})


def note(folder: Path, key: str, value: Any) -> None:
    """Add ``value`` to the list ``key`` of the run's run.json. Raises OSError."""
    path = folder / MARKER
    about = read_sealed(path)
    noted = about.get(key, [])
    if noted[-1:] != [value]:
        write_whole(path, sealed(about | {key: [*noted, value]}))
