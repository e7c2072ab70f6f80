"""Execution of a sweep's runs on this machine, several at a time, with a live table and restarts after a
crash."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import IO

from common.files import open_own
from launch.slurm import ROOT, command
from launch.state import State, last_line, tail

WAITING, RUNNING, DONE, FAILED, STOPPED = "waiting", "running", "finished", "failed", "stopped"
REFUSED, REQUEUE = 2, 75
"""Exit codes of train.py: settings refused (trying again is useless); interrupted and saved (start the same
command again)."""
MOST_RESTARTS = 20
"""How often a run is started again after an interruption from outside."""


@dataclass
class Task:
    """A run and its process."""

    state: State
    log: Path
    status: str = WAITING
    failures: int = 0
    restarts: int = 0
    code: int | None = None
    slot: int | None = None
    started: float = 0.0
    seconds: float = 0.0
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    def note(self, said: str) -> None:
        """Add a line to the log, in the form that job.sh.j2 writes and launch.outcomes reads."""
        start = self.failures + self.restarts + 1
        with self.opened() as log:
            place = f"{self.state.run.name}, here, start {start}"
            log.write(f"[{datetime.now():%F %T} {place}] {said}\n".encode())

    def opened(self) -> IO[bytes]:
        """Open the log to add to it. Raises OSError for a link (``open_own``)."""
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
        self.stopping = False

    def run(self, out: IO[str]) -> list[Task]:
        """Do all runs and return the tasks. SIGINT and SIGTERM make every run save and end."""
        old = {number: signal.signal(number, self._stop) for number in (signal.SIGINT, signal.SIGTERM)}
        screen = Screen(out)
        try:
            while any(task.status in (WAITING, RUNNING) for task in self.tasks):
                self._start()
                time.sleep(0.2)
                self._collect()
                screen.draw(self.tasks)
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)
        return self.tasks

    def _start(self) -> None:
        taken = {task.slot for task in self.tasks if task.status == RUNNING}
        free = [slot for slot in range(self.slots) if slot not in taken]
        for task, slot in zip((task for task in self.tasks if task.status == WAITING), free, strict=False):
            if self.stopping:
                break
            task.slot, task.status, task.started = slot, RUNNING, time.monotonic()
            task.note(f"on {socket.gethostname()}")
            with task.opened() as log:
                # A session of its own: Ctrl-C reaches this process alone, which then signals each run once.
                task.process = subprocess.Popen(
                    self._command(task, slot),
                    cwd=ROOT,
                    env=self._environment(slot),
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                )
        if self.stopping:
            for task in self.tasks:
                task.status = STOPPED if task.status == WAITING else task.status

    def _command(self, task: Task, slot: int) -> list[str]:
        ranks = len(self._devices(slot))
        launcher = (
            ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
        )
        return [sys.executable, *launcher, *command(task.state.run)]

    def _devices(self, slot: int) -> list[str]:
        each = len(self.gpus) // self.slots
        return self.gpus[slot * each : (slot + 1) * each]

    def _environment(self, slot: int) -> dict[str, str]:
        threads = str(max(1, (os.cpu_count() or 1) // self.slots))
        devices = {"CUDA_VISIBLE_DEVICES": ",".join(self._devices(slot))} if self.gpus else {}
        return os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads)} | devices

    def _collect(self) -> None:
        for task in self.tasks:
            if task.process is None or (code := task.process.poll()) is None:
                continue
            task.process, task.code, task.seconds = None, code, task.seconds + time.monotonic() - task.started
            task.note(f"exit code {code}")
            if code == 0 and (task.state.folder / "summary.json").exists():
                task.status = DONE
            elif self.stopping:
                task.status = STOPPED
            elif code == REQUEUE and task.restarts < MOST_RESTARTS:
                task.status, task.restarts = WAITING, task.restarts + 1
            else:
                task.failures += 1
                task.status = WAITING if code != REFUSED and task.failures <= self.retries else FAILED

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self.stopping = True
        for task in self.tasks:
            if task.process is not None and task.process.poll() is None:
                task.process.send_signal(signal.SIGTERM)


class Screen:
    """A table redrawn in place on a terminal; in a log, one line whenever a run's status changes."""

    def __init__(self, out: IO[str]) -> None:
        self.out, self.live, self.drawn, self.at = out, out.isatty(), 0, 0.0
        self.seen: dict[str, tuple[str, int]] = {}

    def draw(self, tasks: Sequence[Task]) -> None:
        running = any(task.status == RUNNING for task in tasks)
        if self.live and running and time.monotonic() - self.at < 1:
            return
        self.at = time.monotonic()
        if self.live:
            rows = shutil.get_terminal_size().lines - 2
            shown = sorted(
                tasks, key=lambda task: (RUNNING, FAILED, WAITING, STOPPED, DONE).index(task.status)
            )[: rows - 1]
            counts = Counter(task.status for task in tasks)
            lines = [", ".join(f"{n} {status}" for status, n in counts.items()), *map(line, shown)]
            self.out.write(f"\x1b[{self.drawn}F\x1b[J" if self.drawn else "")
            self.out.write("\n".join(lines) + "\n")
            self.drawn = len(lines)
        for task in tasks if not self.live else ():
            now = (task.status, task.failures + task.restarts)
            if self.seen.get(task.state.run.name) != now and task.status != WAITING:
                self.out.write(line(task) + "\n")
            self.seen[task.state.run.name] = now
        self.out.flush()


def line(task: Task) -> str:
    """Return one row of the table: name, status, progress, time, and failures."""
    last = last_line(task.state.folder) if task.status != WAITING else {}
    seconds = task.seconds + (time.monotonic() - task.started if task.status == RUNNING else 0)
    parts = [f"{task.state.run.name:<40} {task.status:<9}", f"{seconds:6.0f} s"]
    parts += [f"step {last['step'] + 1}"] if last else []
    parts += [f"loss {last['loss']:.4f}"] if last.get("loss") is not None else []
    parts += [f"exit code {task.code}"] if task.code and task.status != DONE else []
    parts += (
        [f"failed {task.failures} time{'s' * (task.failures > 1)} before"]
        if task.failures and task.status != FAILED
        else []
    )
    return "  ".join(parts)


def failures(tasks: Sequence[Task]) -> str:
    """Return the last output of the failed runs."""
    return "\n".join(
        f"\n--- {task.state.run.name}: exit code {task.code}, {task.log}\n" + "\n".join(tail(task.log))
        for task in tasks
        if task.status == FAILED
    )
