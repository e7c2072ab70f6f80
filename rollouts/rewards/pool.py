"""Code that cannot be trusted to return, in worker processes that can be killed: a user's function, or a symbolic comparison.

A time limit inside the process (math-verify's ``signal.alarm``) works on the main thread alone and interrupts no C code; killing
the process from outside always works.
"""

from __future__ import annotations

import os
import queue
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from common.errors import ConfigError
from common.imports import import_function
from common.worker_process import SamplerError, WorkerProcess, serve
from rollouts.rewards.base import Missing, RewardError

START_S = 180.0
"""Seconds a worker may take to import what it will run."""


class Pool:
    """Up to ``workers`` processes that each run ``loader(argument)``, a function of one task, on many tasks.

    ``loader``: import path of ``f(argument) -> (task -> result)``, called once in every worker; its time does not count towards
    ``timeout``, the seconds that one task may take. Argument, tasks and results are pickled. Processes start when they are first
    needed and live until ``close``; what they print goes to ``log_dir``.
    """

    def __init__(
        self, loader: str, argument: Any, *, workers: int, timeout: float, log_dir: Path | None = None
    ) -> None:
        self.loader, self.argument, self.workers, self.timeout = loader, argument, workers, timeout
        self._log_dir = log_dir or Path(tempfile.mkdtemp(prefix="rewards-"))
        self._idle: queue.SimpleQueue[WorkerProcess] = queue.SimpleQueue()

    def start(self) -> None:
        """Have one worker ready. Raises RewardError if its function cannot be loaded."""
        self._idle.put(self._take())

    def map(self, tasks: Sequence[Any]) -> list[Any]:
        """The result of each task, in order; Missing for one that raised, took too long or ended its process.

        Raises RewardError if the function cannot be loaded.
        """
        with ThreadPoolExecutor(self.workers) as threads:
            return list(threads.map(self._run, tasks))

    def close(self) -> None:
        """End the workers; whatever they are doing."""
        while not self._idle.empty():
            self._idle.get().close(grace=0.0)

    def _run(self, task: Any) -> Any:
        worker = self._take()
        start = time.monotonic()
        try:
            succeeded, result = worker.call("run", task, timeout=self.timeout)
        except SamplerError:  # it is dead, killed or not: the next task gets a new one
            if time.monotonic() - start >= self.timeout:
                return Missing(f"took longer than {self.timeout:g} s and was killed")
            return Missing(f"ended its process{_last_line(worker.log)}")
        self._idle.put(worker)
        return result if succeeded else Missing(result)

    def _take(self) -> WorkerProcess:
        try:
            return self._idle.get_nowait()
        except queue.Empty:
            return self._new()

    def _new(self) -> WorkerProcess:
        with tempfile.NamedTemporaryFile(
            dir=self._log_dir, prefix="worker-", suffix=".log", delete=False
        ) as file:
            log = Path(file.name)
        env = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "OMP_NUM_THREADS": "1"}
        worker = WorkerProcess("rollouts.rewards.pool", log=log, env=env)
        try:
            error = worker.call("load", self.loader, self.argument, timeout=START_S)
        except SamplerError as reason:
            raise RewardError(
                f"the worker process of {self.argument or self.loader} did not start: {reason}"
            ) from reason
        if error is not None:
            worker.close(grace=0.0)
            raise RewardError(error)
        return worker


def describe(error: Exception) -> str:
    """The kind and the first line of an exception, bounded."""
    message = str(error).strip()
    return f"{type(error).__name__}: {message.splitlines()[0][:200]}" if message else type(error).__name__


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return f" ({last[:200]})" if last else ""


class _Worker:
    """The worker's side."""

    def __init__(self) -> None:
        self._function: Callable[[Any], Any] | None = None

    def load(self, loader: str, argument: Any) -> str | None:
        """None, or why the function cannot be loaded."""
        try:
            self._function = import_function("loader", loader)(argument)
        except ConfigError as error:
            return error.remedy
        except Exception as error:
            return describe(error)
        return None

    def run(self, task: Any) -> tuple[bool, Any]:
        assert self._function is not None, "load comes first"
        try:
            return True, self._function(task)
        except Exception as error:
            return False, describe(error)


if __name__ == "__main__":
    worker = _Worker()
    serve({"load": worker.load, "run": worker.run})
