"""Execution of a sweep's runs on this machine, several at a time, with restarts after a crash."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import IO

from common.files import open_own
from common.lock import holder
from common.ports import free_port
from config.load import LOCK
from config.machine import MARK
from launch.slurm import ROOT, command
from launch.state import FAILED, RUNNING, WAITING, State, last_line, tail
from reports.outcome import FINISHED

STOPPED = "stopped"
REFUSED, REQUEUE = 2, 75
"""Exit codes of train.py: settings refused (trying again is useless); interrupted and saved (start the same
command again)."""
MOST_RESTARTS = 20
"""How often a run is started again after an interruption from outside."""
GRACE = 60.0
"""Seconds in which the other ranks of a run may end too once one has ended. Those left then hang, and are
killed (as in job.sh.j2)."""


@dataclass
class Task:
    """A run and its processes, one for each rank."""

    state: State
    log: Path
    status: str = WAITING
    failures: int = 0
    restarts: int = 0
    code: int | None = None
    slot: int | None = None
    started: float = 0.0
    seconds: float = 0.0
    told: int = 0
    """Number of signals that the run was handed."""
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list, repr=False)
    first_end: float | None = None
    """When the first of the ranks had ended."""
    other: str | None = None
    """The process that this sweep did not start and that is at work on the run, so that it is waited for."""

    @property
    def holder(self) -> str | None:
        """The process that holds the lock of the run's folder."""
        return holder(self.state.folder / LOCK)

    def poll(self) -> int | None:
        """Return the exit code of the first rank that ended badly, or 0, once all have ended; None before.
        Where another sweep's process has ended without finishing the run, it is to be started again."""
        if self.other is not None:
            self.code = 0 if (self.state.folder / "summary.json").exists() else REQUEUE
            return None if self.holder else self.code
        ended = [code for code in (process.poll() for process in self.processes) if code is not None]
        self.code = self.code or next((code for code in ended if code), 0)
        if len(ended) == len(self.processes):
            return self.code
        if ended:
            self.first_end = self.first_end or time.monotonic()
            if time.monotonic() - self.first_end > GRACE:
                self.send(signal.SIGKILL)
        return None

    def send(self, number: signal.Signals) -> None:
        for process in self.processes:
            process.send_signal(number)

    def note(self, said: str) -> None:
        """Add a line to the log, in the form that job.sh.j2 writes and launch.state reads."""
        start = self.failures + self.restarts + 1
        with self.opened() as log:
            place = f"{self.state.run.name}, here, start {start}"
            log.write(f"[{datetime.now():%F %T} {place}] {said}\n".encode())

    def opened(self) -> IO[bytes]:
        return os.fdopen(open_own(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab")


class Pool:
    """Does ``slots`` runs at a time, each with an equal share of ``gpus`` (indices; none: CPU) and of the
    cores."""

    def __init__(
        self, states: Sequence[State], logs: Path, slots: int, gpus: Sequence[str] = (), retries: int = 1
    ) -> None:
        logs.mkdir(parents=True, exist_ok=True)
        self.tasks = [Task(state, logs / f"{state.run.name}.local.out") for state in states]
        self.slots, self.gpus, self.retries = slots, list(gpus), retries
        self.asked = 0
        """Number of signals that asked for a stop."""

    def run(self, out: IO[str]) -> list[Task]:
        """Do all runs and return the tasks, with a line whenever the status of one changes. SIGINT and
        SIGTERM make every run save and end."""
        old = {number: signal.signal(number, self._stop) for number in (signal.SIGINT, signal.SIGTERM)}
        shown: dict[str, tuple[str, int]] = {}
        try:
            while any(task.status in (WAITING, RUNNING) for task in self.tasks):
                self._start()
                time.sleep(0.2)
                self._hand_on()
                self._collect()
                for task in self.tasks:
                    now = (task.status, task.failures + task.restarts)
                    if task.status != WAITING and shown.get(task.state.run.name) != now:
                        print(line(task), file=out, flush=True)
                        shown[task.state.run.name] = now
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)
        return self.tasks

    def _start(self) -> None:
        taken = {task.slot for task in self.tasks if task.status == RUNNING}
        free = [slot for slot in range(self.slots) if slot not in taken]
        for task, slot in zip((task for task in self.tasks if task.status == WAITING), free, strict=False):
            if self.asked:
                break
            task.slot, task.status, task.started = slot, RUNNING, time.monotonic()
            task.note(f"on {socket.gethostname()}")
            task.processes, task.code, task.first_end = [], None, None
            task.other = task.holder
            if task.other is not None:
                task.note(f"waits for {task.other}, which is at work on it")
                continue
            with task.opened() as log:
                for environment in self._environments(task, slot):
                    # A session of its own: Ctrl-C reaches this process alone, which hands it on once.
                    process = subprocess.Popen(
                        [sys.executable, *command(task.state.run)],
                        cwd=ROOT,
                        env=environment,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        stdin=subprocess.DEVNULL,
                        start_new_session=True,
                    )
                    task.processes.append(process)
        if self.asked:
            for task in self.tasks:
                task.status = STOPPED if task.status == WAITING else task.status

    def _environments(self, task: Task, slot: int) -> list[dict[str, str]]:
        """Return the environment of each rank of a run."""
        each = len(self.gpus) // self.slots
        devices = self.gpus[slot * each : (slot + 1) * each]
        ranks = max(1, len(devices))
        threads = str(max(1, (os.cpu_count() or 1) // (self.slots * ranks)))
        shared = os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads)}
        shared |= {"CUDA_VISIBLE_DEVICES": ",".join(devices)} if self.gpus else {}
        if ranks == 1:
            return [shared]
        shared |= {MARK: task.state.run.name, "WORLD_SIZE": str(ranks)}
        shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        return [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]

    def _hand_on(self) -> None:
        """Hand every run the signals that this process got, also one that was being started then. A run that
        was only waited for goes on."""
        for task in self.tasks:
            if self.asked and task.status == RUNNING and task.other is not None:
                task.status = STOPPED
            while task.status == RUNNING and task.told < self.asked:
                task.told += 1
                task.send(signal.SIGTERM)

    def _collect(self) -> None:
        for task in self.tasks:
            if task.status != RUNNING or (code := task.poll()) is None:
                continue
            task.seconds += time.monotonic() - task.started
            task.note(f"exit code {code}")
            if code == 0 and (task.state.folder / "summary.json").exists():
                task.status = FINISHED
            elif self.asked:
                task.status = STOPPED
            elif task.holder is not None:  # another sweep was faster: it is waited for next
                task.status = WAITING
            elif code == REQUEUE and task.restarts < MOST_RESTARTS:
                task.status, task.restarts = WAITING, task.restarts + 1
            else:
                task.failures += 1
                task.status = WAITING if code != REFUSED and task.failures <= self.retries else FAILED

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self.asked += 1


def line(task: Task) -> str:
    """Return a line about a run: name, status, progress, time, and failures."""
    last = last_line(task.state.folder) if task.status != WAITING else {}
    seconds = task.seconds + (time.monotonic() - task.started if task.status == RUNNING else 0)
    parts = [f"{task.state.run.name:<40} {task.status:<9}", f"{seconds:6.0f} s"]
    parts += [f"step {last['step'] + 1}"] if last else []
    parts += [f"by {task.other}"] if task.other is not None and task.status == RUNNING else []
    parts += [f"loss {last['loss']:.4f}"] if last.get("loss") is not None else []
    parts += [f"exit code {task.code}"] if task.code and task.status != FINISHED else []
    if task.failures and task.status != FAILED:
        parts.append(f"failed {task.failures} time{'s' * (task.failures > 1)} before")
    return "  ".join(parts)


def failures(tasks: Sequence[Task]) -> str:
    """Return the last output of the failed runs."""
    return "\n".join(
        f"\n--- {task.state.run.name}: exit code {task.code}, {task.log}\n" + "\n".join(tail(task.log))
        for task in tasks
        if task.status == FAILED
    )
