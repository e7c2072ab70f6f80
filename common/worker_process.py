"""A Python module run as a worker process, with requests and replies over a pipe, time limits, and a
guarantee that it ends with its owner.

The worker is started by ``python -m module`` and not by ``multiprocessing``: it gets its own environment,
process group and log, and the owner's main module is not imported a second time. Every failure in the worker
reaches the owner as a WorkerError. For an exception, the error has the worker's traceback, and the worker
lives on. If the worker dies or does not answer in time, the error has the end of its log, and the rest of its
process group is killed.

A process that the worker's code forks cannot use the pipe.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import IO, Any

from common.errors import StoppedError
from common.files import open_own
from common.progress import guard_output, pause

_APPEND = os.O_RDWR | os.O_CREAT | os.O_APPEND
ROOT = Path(__file__).resolve().parent.parent
LAUNCHER = {"LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
LAUNCHER |= {"RANK", "WORLD_SIZE"}
"""Variables by which a launcher (torchrun, accelerate) tells the owner its rank. A worker that read them
would join the owner's process group."""

_POLL_S = 0.5
_GRACE_S = 10.0
_STALLED_S = 60
"""Seconds without a byte after which a message that has begun is given up."""
_LOG_LINES = 25
_TAIL_BYTES = 64 * 1024
_LEAVE = "leave"
_LOG_TO = "log to"
"""Requests that ``serve`` handles itself. Their names cannot collide with handlers, which have the names of
Python functions."""


_cores: set[int] = set()


def run_workers_on(cores: set[int]) -> None:
    """Let workers that start from now on run on these cores, and not on the owner's alone: Slurm gives each
    rank a few of a node's, and while a worker works, the other ranks wait."""
    _cores.clear()
    _cores.update(cores)


class WorkerError(StoppedError):
    """A worker or sampler that failed, died, did not answer in time, or samples from other weights than the
    trainer's."""


class WorkerProcess:
    """One worker process. It answers requests in order; only one thread may use it at a time."""

    def __init__(self, module: str, *, log: Path | None, env: Mapping[str, str]) -> None:
        """Start ``python -m module``, which must call ``serve``. ``env`` overrides the owner's environment.
        The output is appended to the file ``log``. If ``log`` is None, it goes to an unnamed temporary file,
        which is deleted with the worker, until ``log_to`` is called."""
        self.module, self.log = module, log
        self._answer: tuple[bool, Any] | None = None
        """whether the oldest request succeeded, and its value; None before it is answered"""
        self._output, self._since = _opened(log)
        self._printed = ""
        ours, theirs = socket.socketpair()
        inherited = {
            key: value
            for key, value in os.environ.items()
            if key not in LAUNCHER and not key.startswith("TORCHELASTIC_")
        }
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                env={**inherited, "PYTHONPATH": path, **env},
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        if _cores:
            with contextlib.suppress(OSError):  # none of them is there any more, or it has ended already
                os.sched_setaffinity(self._process.pid, _cores)
        within = struct.pack("ll", _STALLED_S, 0)  # a length without its bytes would be waited for
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, within)
        self._connection = Connection(ours.detach())

    @property
    def pid(self) -> int:
        """Process id of the worker, which is also the id of its process group."""
        return self._process.pid

    def send(self, method: str, *arguments: Any) -> None:
        """Send a request without waiting for the reply. Raises WorkerError if the worker has died."""
        try:
            self._connection.send((method, arguments))
        except OSError as error:
            raise self._gone("died") from error

    def receive(self, timeout: float, begun: float | None = None) -> Any:
        """Return the reply to the oldest unanswered request.

        Raises WorkerError if the request raised an exception, if the worker died, or if no reply came within
        ``timeout`` seconds; it is then killed. The seconds count from ``begun`` on the monotonic clock, or
        from now if ``begun`` is None.
        """
        deadline = (time.monotonic() if begun is None else begun) + timeout
        while not self.ready(min(_POLL_S, max(0.0, deadline - time.monotonic()))):
            if time.monotonic() >= deadline:
                raise self._gone(f"did not answer within {timeout:g} s and was killed", wait=0.0)
        assert self._answer is not None
        (succeeded, value), self._answer = self._answer, None
        if not succeeded:
            raise WorkerError(f"{self.module} raised an exception:\n{value}")
        return value

    def ready(self, seconds: float) -> bool:
        """Return whether the reply to the oldest unanswered request has arrived. Wait for it at most
        ``seconds``. Raises WorkerError if the worker died, or if it wrote what is no reply (it is then
        killed)."""
        try:
            if self._answer is None and self._connection.poll(seconds):
                try:
                    succeeded, value = self._connection.recv()
                except (EOFError, OSError):
                    raise
                except Exception as error:  # code in the worker may write into every descriptor that it finds
                    raise self._gone("wrote what is no reply and was killed", wait=0.0) from error
                self._answer = (succeeded, value)
            # Processes that the worker started may hold its end of the pipe open: its death does not always
            # show as an end of file.
            dead = self._answer is None and self._process.poll() is not None
            if dead and not self._connection.poll(0):
                raise self._gone("died")
        except (EOFError, OSError) as error:
            raise self._gone("died") from error
        return self._answer is not None

    def call(self, method: str, *arguments: Any, timeout: float) -> Any:
        """Send a request and return its reply (``send``, then ``receive``)."""
        self.send(method, *arguments)
        return self.receive(timeout)

    def log_to(self, log: Path, timeout: float) -> None:
        """Make the worker append its output to ``log`` from now on, after a copy of what it printed so far.
        Raises WorkerError."""
        output, since = _opened(log)
        output.write(self._read().encode())
        output.flush()
        self.call(_LOG_TO, str(log.absolute()), timeout=timeout)
        self._output.close()
        self.log, self._output, self._since = log, output, since

    def last_words(self, lines: int = _LOG_LINES) -> str:
        """Return the last ``lines`` non-empty lines that this worker printed. This also works after the
        worker has ended."""
        printed = self._printed if self._output.closed else self._read()
        return "\n".join([line for line in printed.splitlines() if line.strip()][-lines:])

    def close(self, grace: float = _GRACE_S) -> None:
        """Ask the worker to leave, and kill it if it still runs after ``grace`` seconds. All processes that
        it started are killed in any case."""
        if self._connection.closed:
            return
        with contextlib.suppress(OSError):
            self._connection.send((_LEAVE, ()))
        self._connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(grace)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        self._printed = self._read()
        self._output.close()

    def _read(self) -> str:
        """Return the end of this worker's output."""
        size = os.fstat(self._output.fileno()).st_size
        start = max(self._since, size - _TAIL_BYTES)
        return os.pread(self._output.fileno(), max(0, size - start), start).decode(errors="replace")

    def _gone(self, how: str, wait: float = 1.0) -> WorkerError:
        """Kill what is left of the worker and return the error to raise. Wait up to ``wait`` seconds for its
        exit code."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(wait)
        code = self._process.poll()
        self.close(grace=0.0)
        status = "" if code is None else f" (exit code {code})"
        if code is not None and code < 0:
            status = f" ({signal.Signals(-code).name})"
        heading = f"the end of {self.log}" if self.log is not None else "its last words"
        return WorkerError(f"the process {self.module} {how}{status}; {heading}:\n{self.last_words()}")


def replies_of(workers: Sequence[WorkerProcess], timeout: float) -> list[Any]:
    """Return the replies of all ``workers`` to the requests already sent to them, in the order of
    ``workers``. Raises WorkerError, and Requeue where the run is asked to stop meanwhile."""
    begun, waiting = time.monotonic(), list(workers)
    while waiting and time.monotonic() < begun + timeout:
        waiting = [worker for worker in waiting if not worker.ready(_POLL_S / len(waiting))]
        if waiting:
            pause()
    return [worker.receive(timeout, begun) for worker in workers]


def _opened(log: Path | None) -> tuple[IO[bytes], int]:
    """Return (the file that a worker writes to and its owner reads, its present length in bytes)."""
    if log is None:
        return tempfile.TemporaryFile("a+b"), 0
    log.parent.mkdir(parents=True, exist_ok=True)
    output = os.fdopen(open_own(log, _APPEND), "a+b")
    return output, os.fstat(output.fileno()).st_size


def serve(handlers: Mapping[str, Callable[..., Any]]) -> None:
    """Run the worker's side: answer requests with ``handlers`` until the owner sends the leave request or
    ends."""
    descriptor, owner = int(sys.argv[1]), int(sys.argv[2])
    os.set_inheritable(descriptor, False)
    guard_output()  # without a buffer, which keeps the last lines of a killed worker
    threading.Thread(target=_end_with, args=(owner,), daemon=True).start()
    connection = Connection(descriptor)
    os.register_at_fork(after_in_child=connection.close)
    all_handlers: dict[str, Callable[..., Any]] = {**handlers, _LOG_TO: _log_to}
    try:
        while (request := connection.recv())[0] != _LEAVE:
            method, arguments = request
            try:
                answer = ForkingPickler.dumps((True, all_handlers[method](*arguments)))
            except Exception:
                answer = ForkingPickler.dumps((False, traceback.format_exc()))
            connection.send_bytes(answer)
    except (EOFError, ConnectionError):
        _kill_group()


def _log_to(log: str) -> None:
    """Append the output of this process to the file ``log`` from now on."""
    descriptor = open_own(Path(log), _APPEND)
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    os.close(descriptor)


def _end_with(owner: int) -> None:
    """Wait until ``owner``, this process's parent, has ended, then end this process."""
    while os.getppid() == owner:
        time.sleep(_POLL_S)
    _kill_group()


def _kill_group() -> None:
    """Kill this process and all processes that it started."""
    os.killpg(os.getpgid(0), signal.SIGKILL)
