"""Programs in processes of their own whose imports are done.

A Python that imports torch and transformers costs seconds of a core, and many tests need one: to be killed, or to
be one of several ranks. ``start`` has them forked from the server of multiprocessing, which has imported what they
need. What they start themselves is started without it.
"""  # noqa: E501

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import multiprocessing
import os
import resource
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.forkserver import _forkserver
from pathlib import Path
from typing import Any

from common.ports import free_port

ROOT = Path(__file__).parent.parent
HANG = 900.0
"""Seconds that only a hang takes, however busy the machine is."""
SERVER = multiprocessing.get_context("forkserver")
HEAVY = """
torch._dynamo torch.distributed.fsdp torch.distributed.checkpoint.state_dict
transformers.models.auto.modeling_auto transformers.models.llama.modeling_llama hydra.core.plugins
datasets peft wandb math_verify scipy.stats matplotlib.backends.backend_svg
reports.report jobs.job jobs.stages evals.running evals.accuracy evals.compare
tests.quick_start
"""
SERVER.set_forkserver_preload(HEAVY.split())


class Program:
    """A started program. It writes what it prints into ``stdout`` and ``stderr``, or both into ``log``."""

    def __init__(self, words: Sequence[str], cwd: Path, env: Mapping[str, str], log: Path | None) -> None:
        self.words = list(words)
        self.stdout, self.stderr = (log, log) if log is not None else (_scratch(".out"), _scratch(".err"))
        self.stdout.touch()  # it may be read before the program has begun
        streams = (str(self.stdout), str(self.stderr))
        self._process = SERVER.Process(target=_be, args=(self.words, str(cwd), dict(env), streams))
        with contextlib.chdir(ROOT):  # where the server imports from
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
            raise subprocess.TimeoutExpired(self.words, timeout, self.said())
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
    *words: str | Path, cwd: Path = ROOT, env: Mapping[str, str] | None = None, log: Path | None = None
) -> Program:
    """``python WORDS``: a script, ``-m`` and a module, or ``-c`` and code, in a session of its own.

    ``env`` goes over this process's environment. ``log`` gets, at its end, both streams. In another ``cwd`` than this
    repository it imports what lies there.
    """  # noqa: E501
    return Program([str(word) for word in words], cwd, os.environ | (env or {}), log)


def run(*words: str | Path, timeout: float = HANG, **settings: Any) -> subprocess.CompletedProcess[str]:
    """``start`` and wait: as ``subprocess.run`` with captured text."""
    program = start(*words, **settings)
    code = program.wait(timeout)
    out, err = (path.read_text(errors="replace") for path in (program.stdout, program.stderr))
    return subprocess.CompletedProcess(program.words, code, out, err)


def ranks(
    count: int, *words: str | Path, env: Mapping[str, str] | None = None, **settings: Any
) -> list[Program]:
    """A program on several ranks of this machine, started as a launcher would."""
    common = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    common |= {"TORCHELASTIC_RUN_ID": f"run-{common['MASTER_PORT']}"} | dict(env or {})
    each = [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]
    return [start(*words, env=own, **settings) for own in each]


def finished(programs: Sequence[Program]) -> str:
    """What the first of the ranks printed, once all have ended. Raises AssertionError where one failed."""
    until(lambda: all(one.poll() == 0 for one in programs) or any(one.poll() for one in programs))
    failed = [program for program in programs if program.poll()]
    for program in programs:
        program.kill()
    assert not failed, "\n".join(program.said()[-3000:] for program in failed)
    return programs[0].said()


def started_in_ranks(
    worker: Callable[..., None], arguments: tuple[str | int, ...], ranks: int
) -> list[Program]:
    """Call ``worker(rank, *arguments)`` in ``ranks`` processes."""
    imported = f"import sys; from {worker.__module__} import {worker.__name__} as f"
    code = f"{imported}; f(int(sys.argv[1]), *{arguments!r})"
    return [start("-c", code, str(rank)) for rank in range(ranks)]


def in_ranks(worker: Callable[..., None], arguments: tuple[str | int, ...], ranks: int) -> None:
    """The same to its end; where one fails, end all and say why."""
    finished(started_in_ranks(worker, arguments, ranks))


def until(condition: Callable[[], Any], said: Callable[[], str] = str, seconds: float = HANG) -> None:
    """Wait for ``condition``; where it never comes, fail with what ``said`` says."""
    end, pause = time.monotonic() + seconds, 0.002
    while not condition():
        assert time.monotonic() < end, said()
        time.sleep(pause)
        pause = min(1.1 * pause, 0.05)


def writers(file: Path) -> list[int]:
    """Process ids of those whose standard output is this file."""
    found = []
    for stream in Path("/proc").glob("[0-9]*/fd/1"):
        with contextlib.suppress(OSError):
            if stream.samefile(file):
                found.append(int(stream.parts[2]))
    return found


def alive(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


def end_all() -> None:
    """End the programs that still run."""
    for process in multiprocessing.active_children():
        process.kill()


def cpu_seconds() -> float:
    """CPU seconds of this process, of its children that have ended, and of the programs that have."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    own = time.process_time() + children.ru_utime + children.ru_stime
    server: int | None = _forkserver._forkserver_pid  # type: ignore[attr-defined]
    if server is None:
        return own
    status = Path(f"/proc/{server}/stat").read_text().rpartition(")")[2].split()
    return own + sum(map(int, status[11:15])) / os.sysconf("SC_CLK_TCK")


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="programs-")


def _scratch(suffix: str) -> Path:
    handle, name = tempfile.mkstemp(suffix=suffix, dir=_folder().name)
    os.close(handle)
    return Path(name)


# -- in the process that is forked -----------------------------------------------------------------


def _be(words: list[str], cwd: str, env: dict[str, str], streams: tuple[str, str]) -> None:
    """Do what ``python WORDS`` does, and end as it does."""
    gc.freeze()  # what was imported stays
    os.setsid()
    atexit._clear()  # type: ignore[attr-defined]  # what the server has to do when it ends
    for number, name in enumerate(streams, 1):
        file = os.open(name, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.dup2(file, number)
        os.close(file)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    from tqdm import tqdm

    from tests.quick_start import blank_charts, compose_quickly

    # the forks share its own: one that is killed while it holds it would stop others
    tqdm.set_lock(threading.RLock())
    compose_quickly()
    blank_charts()
    try:
        _execute(words, [] if Path(cwd) == ROOT else [name for name in sys.modules if _ours(name)])
    finally:
        atexit._run_exitfuncs()


def _ours(name: str) -> bool:
    """Whether a module is one of this repository, and not of its environment."""
    file = getattr(sys.modules[name], "__file__", None) or ""
    return file.startswith(f"{ROOT}/") and not file.startswith(f"{ROOT}/.venv/")


def _execute(words: list[str], forgotten: list[str]) -> None:
    for name in forgotten:  # there are others where it runs
        del sys.modules[name]
    own = [entry for entry in sys.path if entry.startswith((sys.prefix, sys.base_prefix))]
    path = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    first, *rest = words
    if first == "-c":
        sys.argv, sys.path[:] = ["-c", *rest[1:]], ["", *path, *own]
        module = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), module.__dict__)
    elif first == "-m":
        sys.argv, sys.path[:] = rest, [os.getcwd(), *path, *own]
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[:] = words, [os.path.dirname(os.path.realpath(first)), *path, *own]
        runpy.run_path(first, run_name="__main__")
