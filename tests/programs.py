"""Programs in processes of their own, forked from one that has imported what they import.

A Python that imports torch and transformers costs seconds of a core, and many tests need one: to be killed,
or to be one of several ranks. ``start`` gives them a real process (its own id, signals, exit code,
environment and folder) a moment after it was asked for. What must be seen from the first import on is started
with ``subprocess``.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing import process as mp_process
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).parent.parent
HANG = 900.0
"""Seconds that only a hang takes, however busy the machine is."""

_PRELOAD = "tests.preload"
_CONTEXT = multiprocessing.get_context("forkserver")


class Program:
    """A started program; what it prints is in ``stdout`` and ``stderr`` (one file where a log was asked
    for)."""

    def __init__(
        self,
        words: Sequence[str],
        cwd: Path,
        env: Mapping[str, str],
        stdout: Path,
        stderr: Path,
        new_session: bool,
    ) -> None:
        self.words, self.stdout, self.stderr = [str(word) for word in words], stdout, stderr
        arguments = (self.words, str(cwd), dict(env), str(stdout), str(stderr), new_session)
        self._process = context().Process(target=_begin, args=arguments, daemon=True)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """Its exit code, -n where signal n ended it; None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float = HANG) -> int:
        """Its exit code. Raises TimeoutExpired, the program killed, where it does not end."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            self.kill()
            raise subprocess.TimeoutExpired(self.words, timeout)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def said(self) -> str:
        """Everything it has printed so far."""
        return "".join(path.read_text(errors="replace") for path in dict.fromkeys((self.stdout, self.stderr)))


def start(
    *words: str | Path,
    cwd: Path = ROOT,
    env: Mapping[str, str] | None = None,
    log: Path | None = None,
    new_session: bool = False,
) -> Program:
    """``python WORDS``: a script, ``-m`` and a module, or ``-c`` and code. ``env`` goes over this process's
    environment. ``log`` gets, at its end, both streams; without one they are in files that nobody else
    knows."""
    stdout, stderr = (log, log) if log is not None else (_scratch(".out"), _scratch(".err"))
    return Program([str(w) for w in words], cwd, os.environ | (env or {}), stdout, stderr, new_session)


def run(*words: str | Path, timeout: float = HANG, **settings: Any) -> subprocess.CompletedProcess[str]:
    """``start`` and wait: as ``subprocess.run`` with captured text."""
    program = start(*words, **settings)
    code = program.wait(timeout)
    out, err = (path.read_text(errors="replace") for path in (program.stdout, program.stderr))
    if "log" not in settings:
        program.stdout.unlink()
        program.stderr.unlink()
    return subprocess.CompletedProcess(program.words, code, out, err)


def in_ranks(worker: Callable[..., None], arguments: tuple[Any, ...], ranks: int) -> None:
    """Call ``worker(rank, *arguments)`` in ``ranks`` processes; raises what one of them raises."""
    from torch.multiprocessing import (
        start_processes,  # not before the tests have said how many threads torch may have
    )

    context()
    start_processes(worker, arguments, nprocs=ranks, start_method="forkserver")


def torchrun(ranks: int, *words: str | Path) -> list[str]:
    """The words of a program on several ranks of this machine, whose ranks are forked too."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [*launcher, *(str(word) for word in words)]


def until(condition: Callable[[], Any], said: Callable[[], str] = str) -> None:
    """Wait for ``condition``; where it never comes, fail with what ``said`` says."""
    end, pause = time.monotonic() + HANG, 0.002
    while not condition():
        assert time.monotonic() < end, said()
        time.sleep(pause)
        pause = min(1.1 * pause, 0.2)


def cpu_seconds() -> float:
    """CPU seconds of the programs that have ended."""
    _forkserver = forkserver._forkserver  # type: ignore[attr-defined]
    if _forkserver._forkserver_pid is None:
        return 0.0
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{_forkserver._forkserver_pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def _scratch(suffix: str) -> Path:
    handle, name = tempfile.mkstemp(prefix="program-", suffix=suffix)
    os.close(handle)
    return Path(name)


def context() -> BaseContext:
    """How multiprocessing starts processes that are forked from the one that has imported everything, which
    runs from now on."""
    _CONTEXT.set_forkserver_preload([_PRELOAD])
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, (str(ROOT), before))
    )  # it must find the project's modules
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
    return _CONTEXT


# -- in the new process ----------------------------------------------------------------------------


def _begin(
    words: list[str], cwd: str, env: dict[str, str], stdout: str, stderr: str, new_session: bool
) -> NoReturn:
    for fd, path, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, stdout, os.O_WRONLY | os.O_APPEND | os.O_CREAT),
        (2, stderr, os.O_WRONLY | os.O_APPEND | os.O_CREAT),
    ):
        opened = os.open(path, flags, 0o666)
        os.dup2(opened, fd)
        os.close(opened)
    if new_session:
        os.setsid()
    os.chdir(cwd)
    _become(words, env)


def _become(words: list[str], env: Mapping[str, str]) -> NoReturn:
    """Run ``python WORDS`` as if this process had been started for it, and end."""
    for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP, signal.SIGPIPE}:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.environ.clear()
    os.environ.update(env)
    preload = importlib.import_module(_PRELOAD)
    mp_process._current_process = preload.MAIN_PROCESS  # type: ignore[attr-defined]
    mp_process._parent_process = None  # type: ignore[attr-defined]
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", buffering=1 if env.get("PYTHONUNBUFFERED") else -1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    code: Any = 0
    try:
        _execute(words)
    except SystemExit as leaving:
        code = leaving.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        traceback.print_exc()
        code = 1
    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()  # type: ignore[attr-defined]
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(int(code or 0))


def _execute(words: list[str]) -> None:
    if words[0] == "-c":
        sys.argv, sys.path[0:0] = ["-c", *words[2:]], [""]
        module = type(sys)("__main__")
        sys.modules["__main__"] = module
        exec(compile(words[1], "<string>", "exec"), module.__dict__)
    elif words[0] == "-m":
        sys.argv, sys.path[0:0] = words[1:], [os.getcwd()]
        if words[1] == "torch.distributed.run":
            _fork_the_ranks()
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        script = os.path.abspath(words[0])
        sys.argv, sys.path[0:0] = words, [os.path.dirname(script)]
        runpy.run_path(script, run_name="__main__")


class _Forked:
    """What torchrun asks of subprocess.Popen, of a process forked from this one."""

    def __init__(self, words: list[str], env: Mapping[str, str]) -> None:
        self.words, self.returncode = words, None
        before = signal.pthread_sigmask(
            signal.SIG_BLOCK, signal.valid_signals()
        )  # none for this process may reach the new one
        self.pid = os.fork()
        if self.pid == 0:
            os.setsid()
            _become(words, env)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def poll(self) -> int | None:
        return self.returncode if self.returncode is not None else self._read(os.WNOHANG)

    def wait(self, timeout: float | None = None) -> int:
        end = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired(self.words, timeout or 0)
            time.sleep(0.01)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def _read(self, options: int) -> int | None:
        pid, status = os.waitpid(self.pid, options)
        if pid:
            self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


def _fork_the_ranks() -> None:
    module = importlib.import_module(
        "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"
    )

    def popen(self: Any, args: Sequence[str], env: Mapping[str, str]) -> _Forked:
        assert self._stdout is self._stderr is None, "the ranks' output goes where torchrun's goes"
        words = [word for word in args[1:] if word != "-u"]
        return _Forked(words, env)

    module.SubprocessHandler._popen = popen
