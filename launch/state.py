"""How the runs of a sweep stand: what there is to do before anything is started (``State``), by their folders
and settings, and their status (``Status``), by their folders, their logs, and Slurm where available.

A run's log says when each start began and with which exit code it ended (job.sh.j2, launch/local.py).
"""

from __future__ import annotations

import copy
import json
import re
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from common.errors import ConfigError, UserError
from common.lock import holder
from config.cli import UNREADABLE, compose_config
from config.composing import composed
from config.files import FOLDER
from config.load import LOCK, Change, changes, load, refused_changes, started
from config.schema import Config
from launch.grid import Run, override
from launch.slurm import SlurmError, ask, queued, submitted
from reports import outcome
from reports.outcome import FINISHED, NOTHING_LEARNT

PARTIAL, NEW, CHANGED = "unfinished", "new", "settings changed"
"""Kinds of State, beside FINISHED"""
NOT_STARTED, WAITING, RUNNING = "not started", "waiting", "running"
INTERRUPTED, FAILED = "interrupted", "failed"
_STOPPED = (75, -signal.SIGTERM, -signal.SIGINT)
"""Exit codes of a run that was asked to stop: 75 after saving, or a signal's negative number while still
loading."""
_IN_THE_WORKS = ("RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "STOPPED", "STAGE_OUT", "SIGNALING")
"""States of a job in the queue that has nodes."""
_FAILURES = ("FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE", "TIMEOUT")
"""States of a job that ended by itself or at a limit that it was not warned of."""
_OURS = re.compile(r"\[\d{4}-\d\d-\d\d [\d:]{8} .*, start \d+\] (?P<said>.*)")
_ENDED = re.compile(r"exit code (-?\d+)")
_ERROR = re.compile(r"(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit)\b")
_RANK = re.compile(r"^\[rank\d+\]:")
_NOISE = re.compile(r"(?:srun|slurmstepd[\w.-]*|slurmd[\w.-]*): ")
_LINES = 400


class Composer:
    """Makes the settings of a sweep's runs as ``compose_config`` does, but calls Hydra once for each choice
    of files. What it cannot make, ``compose_config`` makes or refuses."""

    def __init__(self) -> None:
        self._composed: dict[tuple[str, ...], DictConfig] = {}

    def config(self, run: Run) -> Config:
        """Return the settings of ``run``. Raises UserError."""
        values = {key: value for key, value in run.all_settings.items() if _is_value(key, value)}
        choices = tuple(override(k, value) for k, value in run.all_settings.items() if k not in values)
        try:
            if choices not in self._composed:
                self._composed[choices] = composed(list(choices))
            settings = copy.deepcopy(self._composed[choices])
            for key, value in values.items():
                OmegaConf.update(settings, key, value)
            return load(settings)
        except (*UNREADABLE, ConfigError):
            return compose_config(run.overrides())


def _is_value(key: str, value: Any) -> bool:
    """Return whether a setting is a plain value of a key, and chooses no file."""
    plain = re.fullmatch(r"[A-Za-z][\w.]*", key) is not None
    return plain and not isinstance(value, dict) and not (FOLDER / key.replace(".", "/")).is_dir()


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
    return FOLDER.parent / config.runs_dir / run.name


@contextmanager
def named(run: Run) -> Iterator[None]:
    """Begin what is refused within with the name of ``run``."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{run.name}: {error.key}", error.value, error.remedy) from error
    except UserError as error:
        raise UserError(f"{run.name}: {error}") from error


def inspect(run: Run, composer: Composer) -> State:
    """Return the state of ``run``. Raises UserError if the run's settings are not valid."""
    with named(run):
        config = composer.config(run)
    folder = folder_of(config, run)
    begun = started(folder)
    differences = changes(folder, config) if begun else []
    if others := refused_changes(differences):
        return State(run, config, CHANGED, text_of(others[0]), others[0])
    if (folder / "summary.json").exists():
        return State(run, config, FINISHED)
    last = last_line(folder)
    return State(run, config, PARTIAL if begun else NEW, f"step {last['step']}" if "step" in last else "")


def text_of(other: Change) -> str:
    """Return a changed setting in words."""
    return f"{other.key}: {other.before} there, {other.now} here"


def last_line(folder: Path) -> dict[str, Any]:
    """Return the last whole line of a run's metrics.jsonl; {} without one."""
    path = folder / "metrics.jsonl"
    if not path.exists():
        return {}
    whole = _end_of(path).rpartition(b"\n")[0].splitlines()
    try:
        metrics = json.loads(whole[-1]) if whole else {}
    except ValueError:  # damaged: the run itself will report it when it goes on
        return {}
    return metrics if isinstance(metrics, dict) else {}


def _end_of(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 65536))
        return file.read()


def tail(path: Path, lines: int = 15) -> list[str]:
    """Return the last lines of a log, with a progress bar cut to its last state; [] without the file."""
    if not path.exists():
        return []
    text = _end_of(path).decode(errors="replace")
    return [line.rstrip("\r").rsplit("\r", 1)[-1] for line in text.split("\n")[:-1]][-lines:]


@dataclass(frozen=True)
class Status:
    """``kind``: one of the five words above, FINISHED or NOTHING_LEARNT. ``detail``: for a failed run, its
    last message. ``log``: the file with that message."""

    kind: str
    detail: str = ""
    log: Path | None = None

    def __str__(self) -> str:
        where = f" ({self.log})" if self.log is not None else ""
        return f"{self.kind}: {self.detail}{where}" if self.detail else self.kind


class Statuses:
    """What is known outside of the run folders, read once for all runs. ``logs``: the sweep's log folder."""

    def __init__(self, logs: Path) -> None:
        self.logs = logs
        self.newest = newest_logs(logs)
        tasks = submitted(logs)
        self.task = {name: task for task, name in tasks.items()}
        """Run -> its last submission."""
        self.queue = _or_nothing(lambda: queued(logs))
        self.accounts = _or_nothing(lambda: accounted(list(tasks)))

    def of(self, name: str, folder: Path) -> Status:
        """Return the status of the run ``name``, whose folder is ``folder``."""
        if (ended := ending_of_folder(folder)) is not None:
            return ended
        if name in self.queue:
            job, state = self.queue[name].split(maxsplit=1)
            return Status(RUNNING if state in _IN_THE_WORKS else WAITING, f"job {job} {state}")
        if (process := holder(folder / LOCK)) is not None:
            return Status(RUNNING, process)
        begun = started(folder)
        log = self.newest.get(name)
        code, message, stopped = (None, "", False) if log is None else ending_of(log)
        if code in _STOPPED or (code is not None and stopped):
            return Status(INTERRUPTED, log=log)
        if code is not None:
            return Status(FAILED, message or f"exit code {code}", log)
        return self._unsaid(name, begun or log is not None, log, message)

    def _unsaid(self, name: str, begun: bool, log: Path | None, message: str) -> Status:
        """Return the status of a run without a recorded end: its process was killed, or it never began.
        ``message``: what its ``log`` says last."""
        task = self.task.get(name, "")
        task_log = self.logs / "slurm" / f"{task}.out"
        state = self.accounts.get(task, "")
        words = [line for line in tail(task_log) if line.strip()]
        if state in _FAILURES:
            return Status(FAILED, f"Slurm: {state}" + (f"; {message}" if message else ""), log or task_log)
        if log is None and words and not state.startswith("CANCELLED"):
            return Status(FAILED, words[-1], task_log)
        return Status(INTERRUPTED if begun else NOT_STARTED, log=log)


def ending_of_folder(folder: Path) -> Status | None:
    """Return FINISHED or NOTHING_LEARNT for a run that has come to its end, judged by its folder alone; None
    for any other. A damaged summary is left to whoever reads its numbers."""
    try:
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        summary = {}
    nothing = isinstance(summary, dict) and summary.get("status") == NOTHING_LEARNT
    return Status(NOTHING_LEARNT, outcome.text_of(summary) or "") if nothing else Status(FINISHED)


def newest_logs(logs: Path) -> dict[str, Path]:
    """Return run -> its most recently written log, of the files ``<run>.<job>.out`` in the folder
    ``logs``."""
    newest: dict[str, Path] = {}
    for path in sorted(logs.glob("*.out"), key=lambda path: path.stat().st_mtime):
        newest[path.name.removesuffix(".out").rpartition(".")[0]] = path
    return newest


def ending_of(log: Path) -> tuple[int | None, str, bool]:
    """Return (the exit code of the last start in ``log``, None if the log does not say; the message about why
    it ended; whether Slurm ended the job), from the log's last lines."""
    lines = tail(log, _LINES)
    ours = [(at, match["said"]) for at, line in enumerate(lines) if (match := _OURS.fullmatch(line))]
    first = max((at for at, message in ours if message.startswith("on ")), default=-1)
    since = [message for at, message in ours if at > first]
    codes = [int(match[1]) for message in since if (match := _ENDED.fullmatch(message))]
    output = [line for line in lines[first + 1 :] if not _OURS.fullmatch(line)]
    early = [message for message in since if message.startswith("failed before")]
    words = (early or [last_words(output)])[-1]
    return codes[-1] if codes else None, words, "Slurm ends this job" in since


def last_words(lines: Sequence[str]) -> str:
    """Return the line of a program's output that says why it ended.

    That is its last ``error: …``, else its last exception, else its last line.
    """
    bare = (_RANK.sub("", line).strip() for line in lines if not _NOISE.match(line))
    spoken = [line for line in bare if line]
    errors = [line for line in spoken if line.startswith("error: ")]
    raised = [line for line in spoken if _ERROR.match(line) and "ChildFailedError" not in line]  # torchrun's
    return (errors or raised or spoken or [""])[-1]


def _or_nothing(query: Callable[[], dict[str, str]]) -> dict[str, str]:
    """Return Slurm's answer, or {} if there is no Slurm here that can answer."""
    try:
        return query()
    except SlurmError:
        return {}


def accounted(tasks: Sequence[str]) -> dict[str, str]:
    """Return a task of an array -> the state of its last job. Raises SlurmError if Slurm keeps no
    accounts."""
    if not tasks:
        return {}
    arrays = dict.fromkeys(task.partition("_")[0] for task in tasks)
    words = ["sacct", "--noheader", "--parsable2", "--allocations", "--format=JobID,State"]
    listing = ask([*words, f"--jobs={','.join(arrays)}"])
    rows = (line.partition("|") for line in listing.splitlines())
    return {task: state.split()[0] for task, _, state in rows if state}
