"""A Python module run as a worker process: requests and replies over a pipe, time limits, and no way to outlive its owner.

The worker is started by ``python -m module`` and not by ``multiprocessing``: it gets its own environment, process group and log,
and the owner's main module is not imported a second time. What goes wrong in it reaches the owner as one SamplerError: an exception
(with the worker's traceback; the worker lives on), its death and its silence (with the end of its log; what is left is killed).
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from common.errors import StoppedError

ROOT = Path(__file__).resolve().parent.parent
LAUNCHER = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "ROLE_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)
"""What a launcher (torchrun, accelerate) tells the owner's rank: a worker that read it would join the owner's process group."""

_POLL_S = 0.5
_GRACE_S = 10.0
_LOG_LINES = 25
_LEAVE = ("", ())


class SamplerError(StoppedError):
    """A sampler that failed, died, kept silent too long, or samples from other weights than the trainer's."""


class WorkerProcess:
    """One worker. Requests are answered in order; one thread at a time may use it."""

    def __init__(self, module: str, *, log: Path, env: Mapping[str, str]) -> None:
        """Start ``python -m module``, which must call ``serve``. ``env`` goes over the owner's environment, output to ``log``."""
        self.module, self.log = module, log
        ours, theirs = socket.socketpair()
        inherited = {
            key: value
            for key, value in os.environ.items()
            if key not in LAUNCHER and not key.startswith("TORCHELASTIC_")
        }
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        log.parent.mkdir(parents=True, exist_ok=True)
        with theirs, log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**inherited, "PYTHONPATH": path, **env},
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        self._connection = Connection(ours.detach())

    @property
    def pid(self) -> int:
        """Process id of the worker, which is its process group's too."""
        return self._process.pid

    def send(self, method: str, *arguments: Any) -> None:
        """Ask, without waiting. Raises SamplerError if the worker is gone."""
        try:
            self._connection.send((method, arguments))
        except OSError as error:
            raise self._gone("died") from error

    def receive(self, timeout: float) -> Any:
        """The reply to the oldest unanswered request.

        Raises SamplerError: the request raised, the worker died, or nothing came within ``timeout`` seconds (it is then killed).
        """
        deadline = time.monotonic() + timeout
        try:
            while not self._connection.poll(min(_POLL_S, max(0.0, deadline - time.monotonic()))):
                # Processes of the worker's own may hold its end of the pipe open: its death is not always an end of file.
                if self._process.poll() is not None and not self._connection.poll(0):
                    raise self._gone("died")
                if time.monotonic() >= deadline:
                    raise self._gone(f"did not answer within {timeout:g} s and was killed", wait=0.0)
            succeeded, value = self._connection.recv()
        except (EOFError, OSError) as error:
            raise self._gone("died") from error
        if not succeeded:
            raise SamplerError(f"{self.module} raised an exception:\n{value}")
        return value

    def call(self, method: str, *arguments: Any, timeout: float) -> Any:
        """``send`` and ``receive``."""
        self.send(method, *arguments)
        return self.receive(timeout)

    def close(self, grace: float = _GRACE_S) -> None:
        """Ask the worker to leave; after ``grace`` seconds it is killed. All that it started is killed in any case."""
        if self._connection.closed:
            return
        with contextlib.suppress(OSError):
            self._connection.send(_LEAVE)
        self._connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(grace)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()

    def _gone(self, how: str, wait: float = 1.0) -> SamplerError:
        """The error to raise, once nothing is left of the worker. It may take ``wait`` seconds to have an exit code."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(wait)
        code = self._process.poll()
        self.close(grace=0.0)
        status = (
            ""
            if code is None
            else f" (exit code {code})"
            if code >= 0
            else f" ({signal.Signals(-code).name})"
        )
        tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-_LOG_LINES:])
        return SamplerError(f"the process {self.module} {how}{status}; the end of {self.log}:\n{tail}")


def serve(handlers: Mapping[str, Callable[..., Any]]) -> None:
    """The worker's side: answer requests by ``handlers`` until the owner says to leave, or is no more."""
    descriptor, owner = int(sys.argv[1]), int(sys.argv[2])
    os.set_inheritable(descriptor, False)
    live_while(owner, _kill_group)
    connection = Connection(descriptor)
    try:
        while (request := connection.recv()) != _LEAVE:
            method, arguments = request
            try:
                reply = (True, handlers[method](*arguments))
            except Exception:
                reply = (False, traceback.format_exc())
            connection.send(reply)
    except (EOFError, ConnectionError):
        _kill_group()


def live_while(owner: int, end: Callable[[], None]) -> None:
    """Have ``end`` called once ``owner``, this process's parent, is gone, whatever this process is doing then."""

    def watch() -> None:
        while os.getppid() == owner:
            time.sleep(_POLL_S)
        end()

    threading.Thread(target=watch, daemon=True).start()


def _kill_group() -> None:
    """Kill this process and all that it started."""
    os.killpg(os.getpgid(0), signal.SIGKILL)
