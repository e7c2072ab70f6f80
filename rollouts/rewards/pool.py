"""Worker processes for code that may never return, such as a user's function or a symbolic comparison. They
can be killed.

A time limit inside the process (math-verify's ``signal.alarm``) works on the main thread alone and interrupts
no C code. Killing the process from outside always works.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from common.imports import import_function
from common.worker_process import WorkerError, WorkerProcess, serve
from rollouts.rewards.base import LOG_NAME, Missing, RewardError, results
from rollouts.rewards.blame import describe

START_S = 180.0
"""Seconds a worker may take to import what it will run."""
LOG_S = 30.0
"""Seconds a worker may take to switch to another log."""
TRACEBACKS = 3
"""How many tracebacks of one failure (the same exception at the same line) a worker logs. Further ones say
nothing more."""


class Pool:
    """Up to ``workers`` processes that each run ``loader(argument)``, a function of one task, on many tasks.

    ``loader`` is the import path of ``f(argument) -> (task -> result)``. It is called once in every worker,
    and its time does not count towards ``timeout``, the seconds that one task may take. The argument, tasks
    and results are pickled. Processes start when they are first needed and live until ``close``.

    What the workers print, and the tracebacks of what they raise, goes to the file ``LOG_NAME`` in
    ``log_dir``. It is created with the first task, because a run may be refused before that and must then
    leave nothing behind. With ``log_dir=None`` the output is not kept.
    """

    def __init__(
        self,
        loader: str,
        argument: Any,
        *,
        workers: int,
        timeout: float,
        log_dir: Path | None = None,
    ) -> None:
        self.loader, self.argument, self.workers, self.timeout = loader, argument, workers, timeout
        self._log = None if log_dir is None else log_dir / LOG_NAME
        self._idle: queue.SimpleQueue[WorkerProcess] = queue.SimpleQueue()
        self._busy: set[WorkerProcess] = set()
        self._threads = ThreadPoolExecutor(workers)
        self._closed = False
        self._about: Any = None
        self._lock = threading.Lock()

    def start(self) -> Any:
        """Start one worker in advance, and return what the function that it loaded says of itself (its
        attribute ``about``, None without one). Raises RewardError if the function cannot be loaded."""
        self._idle.put(self._new(None))
        return self._about

    def map(self, tasks: Sequence[Any]) -> list[Any]:
        """Return the result of each task, in order; Missing for a task that raised, took too long or ended
        its process.

        Raises RewardError if the function cannot be loaded.
        """
        return results([self._threads.submit(self._run, task) for task in tasks])

    def close(self) -> None:
        """End the workers, whatever they are doing."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            self._closed = True
            busy = list(self._busy)
        for worker in busy:  # the thread that waits for it finds it dead
            with contextlib.suppress(ProcessLookupError):
                os.killpg(worker.pid, signal.SIGKILL)
        while not self._idle.empty():
            self._idle.get().close(grace=0.0)

    def _run(self, task: Any) -> Any:
        worker = self._take()
        with self._lock:
            self._busy.add(worker)
        start = time.monotonic()
        try:
            succeeded, result = worker.call("run", task, timeout=self.timeout)
        except WorkerError:  # the worker is dead, killed or not: the next task gets a new one
            late = time.monotonic() - start >= self.timeout
            self._discard(worker)
            if late:
                return Missing(f"took longer than {self.timeout:g} s and was killed")
            last_words = worker.last_words(1).strip()[:200]
            return Missing("ended its process" + (f" ({last_words})" if last_words else ""))
        with self._lock:
            self._busy.discard(worker)
            kept = not self._closed
            if kept:
                self._idle.put(worker)
        if not kept:
            self._discard(worker)
        return result if succeeded else Missing(result)

    def _take(self) -> WorkerProcess:
        """Return a worker. With a ``log_dir``, it writes to the log there."""
        try:
            worker = self._idle.get_nowait()
        except queue.Empty:
            return self._new(self._log)
        if worker.log is None and self._log is not None:
            with self._refused():
                worker.log_to(self._log, LOG_S)
        return worker

    def _discard(self, worker: WorkerProcess) -> None:
        worker.close(grace=0.0)
        with self._lock:
            self._busy.discard(worker)

    def _new(self, log: Path | None) -> WorkerProcess:
        env = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "OMP_NUM_THREADS": "1"}
        worker = WorkerProcess("rollouts.rewards.pool", log=log, env=env)
        try:
            with self._refused():
                error, self._about = worker.call("load", self.loader, self.argument, timeout=START_S)
            if error is not None:
                raise RewardError(error)
        except RewardError:
            self._discard(worker)
            raise
        return worker

    @contextlib.contextmanager
    def _refused(self) -> Iterator[None]:
        try:
            yield
        except WorkerError as reason:
            raise RewardError(
                f"the worker process of {self.argument or self.loader} did not start: {reason}"
            ) from reason


class _Worker:
    """The functions that run in the worker process."""

    def __init__(self) -> None:
        self._function: Callable[[Any], Any] | None = None
        self._logged: Counter[str] = Counter()

    def load(self, loader: str, argument: Any) -> tuple[str | None, Any]:
        """Load the function. Returns (None, what it says of itself), or (the reason why it cannot be loaded,
        None)."""
        try:
            self._function = import_function("loader", loader)(argument)
        except Exception as error:
            return self._report(error), None
        return None, getattr(self._function, "about", None)

    def run(self, task: Any) -> tuple[bool, Any]:
        assert self._function is not None, "load comes first"
        try:
            return True, self._function(task)
        except Exception as error:
            return False, self._report(error)

    def _report(self, error: Exception) -> str:
        """Return the failure in one line, and print its traceback to the log unless it is there often
        enough."""
        description = describe(error)
        self._logged[description] += 1
        if self._logged[description] <= TRACEBACKS:
            with contextlib.suppress(OSError):  # a full disk
                traceback.print_exception(error)
        return description


if __name__ == "__main__":
    worker = _Worker()
    serve({"load": worker.load, "run": worker.run})
