"""Programs in processes of their own whose imports are done.

A Python that imports torch and transformers costs seconds of a core, and many tests need one: to be killed,
or to be one of several ranks. ``start`` gives them a process a moment after it was asked for; the fixture
``quick_python`` does so for whatever a test starts itself. What must be seen from the first import on is
started without either.
"""

from __future__ import annotations

import contextlib
import functools
import marshal
import multiprocessing.spawn
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.quick_python import FIRST, VLLM, QuickPython

if TYPE_CHECKING:  # ranks import this module too
    import pytest

ROOT = Path(__file__).parent.parent
HANG = 900.0
"""Seconds that only a hang takes, however busy the machine is."""
NOTHING_DRAWN = {FIRST: "tests.blank_charts:blank_charts"}
"""Environment of a program that draws no chart."""


class Program:
    """A started program; what it prints is in ``stdout`` and ``stderr`` (one file where a log was asked for).

    It ends when this object is forgotten, and is killed by its own process id: nothing stands between.
    """

    def __init__(
        self, words: Sequence[str], cwd: Path, env: Mapping[str, str], stdout: Path, stderr: Path
    ) -> None:
        self.words, self.stdout, self.stderr = words, stdout, stderr
        self._code: int | None = None
        self._asked = socket.socket(socket.AF_UNIX)
        self._asked.connect(str(forked_from().address))
        about = marshal.dumps([list(words), dict(env), str(cwd), os.getpid(), [0, 1, 2]])
        with open(os.devnull) as nothing, stdout.open("ab") as out, stderr.open("ab") as err:
            files = [nothing.fileno(), out.fileno(), err.fileno()]
            socket.send_fds(self._asked, [len(about).to_bytes(8, "little")], files)
        self._asked.sendall(about)
        self._answers = self._asked.makefile("rb")
        self.pid = int(self._answers.readline())

    def poll(self) -> int | None:
        """Its exit code, -n where signal n ended it; None while it runs."""
        return self._ended(0)

    def wait(self, timeout: float = HANG) -> int:
        """Its exit code. Raises TimeoutExpired, the program killed, where it does not end."""
        if self._ended(timeout) is None:
            self.kill()
            raise subprocess.TimeoutExpired(self.words, timeout, self.said())
        assert self._code is not None
        return self._code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def said(self) -> str:
        """Everything it has printed so far."""
        return "".join(path.read_text(errors="replace") for path in dict.fromkeys((self.stdout, self.stderr)))

    def _ended(self, seconds: float) -> int | None:
        if self._code is None and wait([self._asked], seconds):
            self._code = int(self._answers.readline() or -signal.SIGKILL)
        return self._code


def start(
    *words: str | Path, cwd: Path = ROOT, env: Mapping[str, str] | None = None, log: Path | None = None
) -> Program:
    """``python WORDS``: a script, ``-m`` and a module, or ``-c`` and code, in a session of its own.

    ``env`` goes over this process's environment. ``log`` gets, at its end, both streams; without one they are
    in files that nobody else knows.
    """
    stdout, stderr = (log, log) if log is not None else (_scratch(".out"), _scratch(".err"))
    given = os.environ | NOTHING_DRAWN | (env or {})
    return Program([str(word) for word in words], cwd, given, stdout, stderr)


def run(*words: str | Path, timeout: float = HANG, **settings: Any) -> subprocess.CompletedProcess[str]:
    """``start`` and wait: as ``subprocess.run`` with captured text."""
    program = start(*words, **settings)
    code = program.wait(timeout)
    out, err = (path.read_text(errors="replace") for path in (program.stdout, program.stderr))
    return subprocess.CompletedProcess(program.words, code, out, err)


def torchrun(ranks: int, *words: str | Path) -> list[str]:
    """The words of a program on several ranks of this machine."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [*launcher, *(str(word) for word in words)]


def in_ranks(worker: Callable[..., None] | str, arguments: tuple[str | int, ...], ranks: int) -> None:
    """Call ``worker(rank, *arguments)`` in ``ranks`` processes; where one fails, end the others and say
    why. ``worker``: a function, or, where this process cannot import it, "module:name"."""
    path = worker if isinstance(worker, str) else f"{worker.__module__}:{worker.__name__}"
    module, _, name = path.partition(":")
    code = f"import sys; from {module} import {name} as f; f(int(sys.argv[1]), *{arguments!r})"
    programs = [start("-c", code, str(rank)) for rank in range(ranks)]
    until(lambda: all(p.poll() == 0 for p in programs) or any(p.poll() for p in programs))
    failed = [program for program in programs if program.poll()]
    for program in programs:
        program.kill()
    assert not failed, "\n".join(program.said() for program in failed)


def until(condition: Callable[[], Any], said: Callable[[], str] = str, seconds: float = HANG) -> None:
    """Wait for ``condition``; where it never comes, fail with what ``said`` says."""
    end, pause = time.monotonic() + seconds, 0.002
    while not condition():
        assert time.monotonic() < end, said()
        time.sleep(pause)
        pause = min(1.1 * pause, 0.05)


def writers(file: Path) -> list[int]:
    """Process ids of those whose standard output is this file: of what a program is, not of what stands for
    it."""
    found = []
    for stream in Path("/proc").glob("[0-9]*/fd/1"):
        with contextlib.suppress(OSError):
            if stream.samefile(file):
                found.append(int(stream.parts[2]))
    return found


def use_quick_python(patch: pytest.MonkeyPatch, quick: QuickPython | None = None) -> None:
    """From now on whatever this process starts as its own Python has done its imports, and draws no chart.
    ``quick``: another than ``quick_python``."""
    python = (quick or quick_python()).python
    patch.setattr(sys, "executable", str(python))
    patch.setattr(multiprocessing.spawn, "_python_exe", os.fsencode(python))
    for name, value in NOTHING_DRAWN.items():
        patch.setenv(name, value)


def forked_from() -> QuickPython:
    """The process that ``start`` has its programs from."""
    return quick_python()


@functools.cache
def quick_python() -> QuickPython:
    """The process that all are forked from; it lives as long as this one."""
    return QuickPython(_folder(), ROOT, dict(os.environ)).ready()


@functools.cache
def quick_vllm() -> QuickPython:
    """The process that vLLM's engines and servers are forked from, itself forked from the other."""
    environment = {key: value for key, value in os.environ.items() if key != FIRST}
    return QuickPython(_folder() / "vllm", ROOT, environment, VLLM, quick_python().python).ready()


FORKED = (quick_vllm, quick_python)


def end_all() -> None:
    """End the programs, and the processes that they are forked from."""
    for quick in FORKED:
        if quick.cache_info().currsize:
            quick().close()
            quick.cache_clear()
    if _folder.cache_info().currsize:
        shutil.rmtree(_folder(), ignore_errors=True)
        _folder.cache_clear()


def cpu_seconds() -> float:
    """CPU seconds of this process, of its children that have ended, and of the programs that have."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    own = time.process_time() + children.ru_utime + children.ru_stime
    made = [quick() for quick in FORKED if quick.cache_info().currsize]
    return own + sum(quick.cpu_seconds() for quick in made)


@functools.cache
def _folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="programs-"))


def _scratch(suffix: str) -> Path:
    handle, name = tempfile.mkstemp(suffix=suffix, dir=_folder())
    os.close(handle)
    return Path(name)
