"""A Python that has imported everything already, for tests that type commands.

``QuickPython`` starts one process that imports the heavy libraries and trains, both once, and writes a
``python`` (with ``torchrun`` and ``accelerate`` beside it) that hands its arguments, environment, working
directory and open files to that process, which forks and does what Python would have done. Signals and exit
codes go through, and the end of either is the end of the other, so that launchers, worker processes and
killed runs behave as they do with any Python.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import io
import marshal
import multiprocessing.spawn
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import traceback
import types
import typing
import weakref
from multiprocessing.connection import wait
from pathlib import Path

from tests import quick_start

HEAVY = (
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "torch.distributed.checkpoint.state_dict",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "hydra.core.plugins",
    "datasets",
    "peft",
    "wandb",
    "wandb.sdk.launch",
    "requests",
    "math_verify",
    "scipy.stats",
    "matplotlib.figure",
    "matplotlib.backends.backend_svg",
    "reports.report",
    "torch.distributed.run",
    "jobs.job",
    "jobs.stages",
    "evals.running",
    "evals.accuracy",
    "evals.compare",
)
VLLM = (
    "rollouts.vllm.worker",
    "vllm.entrypoints.openai.api_server",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.models.gpt2",
)
"""What vLLM's engines and servers import besides."""
PYTHON = sys.executable
"""The Python of the tests, also where ``sys.executable`` has been made one whose imports are done. What this
one starts is its child, as it is not of such a one."""
SCRIPTS = {
    "torchrun": ["-m", "torch.distributed.run"],
    "accelerate": ["-m", "accelerate.commands.accelerate_cli"],
}
FIRST = "QUICK_PYTHON_FIRST"
"""Environment variable, ``module:function``: what is called before anything."""
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_SAFE = 512
"""Least descriptor that is this file's own while a program's are put where they belong."""

# It imports what is built in alone: the modules around _signal and _socket, and json, would double its time.
CLIENT = """#!{python} -ISs
import _signal as signal, _socket as socket, marshal, os, sys
blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {forwarded})
ask = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
ask.connect({address!r})
found = [int(n) for n in os.listdir("/proc/self/fd") if int(n) != ask.fileno()]
fds = [n for n in found if os.path.exists(f"/proc/self/fd/{{n}}") and (n < 3 or os.get_inheritable(n))]
given = {scripts}.get(os.path.basename(sys.argv[0]), []) + sys.argv[1:]
about = marshal.dumps([given, dict(os.environ), os.getcwd(), os.getpid(), fds])
sent = b"".join(n.to_bytes(4, sys.byteorder) for n in fds)
ask.sendmsg([len(about).to_bytes(8, "little")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, sent)])
ask.sendall(about)
answers = open(ask.fileno(), "rb", closefd=False)
pid = int(answers.readline() or sys.exit("the process that python is asked of is gone"))
for n in {forwarded}:
    signal.signal(n, lambda number, frame: os.kill(pid, number))
for n in fds:
    os.close(n)
signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
code = int(answers.readline() or -signal.SIGKILL)
if code < 0:
    signal.signal(-code, signal.SIG_DFL) if code != -signal.SIGKILL else None
    os.kill(os.getpid(), -code)
os._exit(code)
"""


class QuickPython:
    """The process, and ``folder`` with what asks it. To be closed, or used as a context."""

    def __init__(
        self,
        folder: Path,
        root: Path,
        environment: dict[str, str],
        more: tuple[str, ...] = (),
        python: str | Path = PYTHON,
    ) -> None:
        """``root``: a copy of the repository, whose modules are imported. ``environment``: what libraries
        read while they are imported. ``more``: modules to import besides.
        ``python``: who runs the process; where that is another's, it begins with what that one has
        imported."""
        folder.mkdir(parents=True, exist_ok=True)
        self.python, self.address = folder / "python", folder / "ask"
        for name in ("python", *SCRIPTS):
            script = CLIENT.format(
                python=PYTHON,
                forwarded=[int(n) for n in FORWARDED],
                address=str(self.address),
                scripts=SCRIPTS,
            )
            (folder / name).write_text(script)
            (folder / name).chmod(0o755)
        self._server = subprocess.Popen(
            [str(python), "-m", "tests.quick_python", str(self.address), str(self.python), *more],
            cwd=root,
            env=environment | {"PYTHONPATH": str(root)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self._pid = 0

    def ready(self) -> QuickPython:
        """Wait until programs may be asked of it, and return it."""
        assert self._server.stdout is not None
        said, _, pid = self._server.stdout.readline().partition(b" ")
        assert said == b"ready", "the imports failed: see the output above"
        self._pid = int(pid)
        return self

    def close(self) -> None:
        """End it, and everything that it runs."""
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait(60)

    def cpu_seconds(self) -> float:
        """CPU seconds of the process and of those of its programs that have ended."""
        status = Path(f"/proc/{self._pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, status[11:15])) / os.sysconf("SC_CLK_TCK")

    def __enter__(self) -> QuickPython:
        return self.ready()

    def __exit__(self, *_: object) -> None:
        self.close()


Request = tuple[list[str], dict[str, str], str, int, list[int], list[int], socket.socket]
"""Arguments, environment, working directory, the client's process id, its descriptors, ours of the same
files, the connection."""


def main(address: str, python: str, *more: str) -> int:
    """Import, then fork for whoever asks, until the owner closes the standard input. Returns in every fork
    too, with its exit code."""
    gc.disable()  # a quarter of the time that imports take would be spent on looking
    for name in (*HEAVY, *more):
        importlib.import_module(name)
    # Its own lock is shared by all forks: a program that is killed while it holds it would stop later ones.
    importlib.import_module("tqdm").tqdm.set_lock(threading.RLock())
    quick_start.warm_up()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{address}.new")
    listener.listen(64)
    os.rename(f"{address}.new", address)  # whoever finds it is answered
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(wake)
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)  # as in the processes that run tests
    gc.enable()
    print("ready", os.getpid(), flush=True)
    running: dict[int, socket.socket] = {}
    gone: set[int] = set()
    while True:
        listening = {pid: connection for pid, connection in running.items() if pid not in gone}
        ready = wait([listener, woken, 0, *listening.values()])
        if 0 in ready:
            for pid in running:
                _kill(pid)
            return 0
        left = {pid for pid, connection in listening.items() if connection in ready}
        for pid in left:  # all that a client says is that it is gone
            _kill(pid)  # before others hear of an end that came later
        if woken in ready:
            os.read(woken, 4096)
            _reap(running)
        gone |= left
        if listener in ready and (request := _received(listener)) is not None:
            pid = os.fork()
            if pid == 0:
                for ours in (listener, *running.values()):
                    ours.detach()  # or their numbers would be closed with them, whoever has them by then
                return _child(request, python)
            for fd in request[5]:
                os.close(fd)
            running[pid] = request[6]
            gone.discard(pid)
            with contextlib.suppress(OSError):
                request[6].sendall(f"{pid}\n".encode())


def _kill(pid: int) -> None:
    """Kill a process and what else is in its session, which it may not have begun yet."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):
            kill(pid, signal.SIGKILL)


def _reap(running: dict[int, socket.socket]) -> None:
    """Tell the clients of processes that have ended how they ended."""
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        with running.pop(pid) as connection, contextlib.suppress(OSError):
            connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())


def _received(listener: socket.socket) -> Request | None:
    """What a client asks; None where it was gone before it had said."""
    connection, _ = listener.accept()
    size, ours, _, _ = socket.recv_fds(connection, 8, 250)
    with connection.makefile("rb") as file:
        text = file.read(int.from_bytes(size, "little"))
    if not text:
        return None
    arguments, environment, cwd, client, theirs = marshal.loads(text)
    return arguments, environment, cwd, client, theirs, ours, connection


def _child(request: Request, python: str) -> int:
    """Be the process that the client stands for."""
    arguments, environment, cwd, client, theirs, ours, connection = request
    os.setsid()
    _leave_ends_of_the_imports()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _take_files(theirs, ours, connection)
    os.environ.clear()
    os.environ.update(environment)
    _read_what_torch_reads()
    os.chdir(cwd)
    me, real = os.getpid(), os.getppid
    os.getppid = (
        lambda: _parent_of(client) if os.getpid() == me else real()
    )  # what is forked from this has its own
    sys.executable = python
    multiprocessing.spawn.set_executable(python)
    importlib.invalidate_caches()
    try:
        if first := environment.get(FIRST):
            module, _, function = first.partition(":")
            getattr(importlib.import_module(module), function)()
        _execute(arguments)
        code = 0
    except SystemExit as left:
        if isinstance(left.code, str):
            print(left.code, file=sys.stderr)
        code = left.code if isinstance(left.code, int) else int(left.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    return code


def _read_what_torch_reads() -> None:
    """The variable that torch reads while it is imported, and that programs here are given."""
    import torch._dynamo

    torch._dynamo.config.disable = os.environ.get("TORCH_COMPILE_DISABLE") == "1"


def _leave_ends_of_the_imports() -> None:
    """Temporary folders that were made while libraries were imported are the first process's to remove; and
    no program need empty the caches of the types, nor word how long Dynamo compiled, when it ends."""
    from torch._dynamo.utils import dump_compile_times
    from wandb.sdk.data_types._private import MEDIA_TMP

    atexit.unregister(MEDIA_TMP.cleanup)
    atexit.unregister(dump_compile_times)
    typing._cleanups.clear()  # type: ignore[attr-defined]
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]


def _take_files(theirs: list[int], ours: list[int], connection: socket.socket) -> None:
    """The client's files under its own numbers, and nothing else open."""
    import fcntl

    aside = max((_SAFE, *(number + 1 for number in theirs)))
    safe = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, aside) for fd in ours]
    connection.detach()
    os.closerange(0, aside)
    for number, fd in zip(theirs, safe, strict=True):
        os.dup2(fd, number, inheritable=True)
        os.close(fd)
    sys.stdin = sys.__stdin__ = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)), "utf-8")
    sys.stdout = sys.__stdout__ = _writer(1, "strict")
    sys.stderr = sys.__stderr__ = _writer(2, "backslashreplace")


def _writer(number: int, errors: str) -> io.TextIOWrapper:
    file = io.FileIO(number, "w", closefd=False)
    return io.TextIOWrapper(io.BufferedWriter(file), "utf-8", errors, line_buffering=True)


def _parent_of(client: int) -> int:
    """The process that started the client; 1 where the client is gone."""
    try:
        return int(Path(f"/proc/{client}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError):
        return 1


def _execute(arguments: list[str]) -> None:
    """What ``python <arguments>`` does."""
    if arguments[0].startswith("-m"):  # -mpip
        arguments = ["-m", *filter(None, [arguments[0][2:]]), *arguments[1:]]
    while arguments and arguments[0].startswith("-") and arguments[0] not in ("-c", "-m"):
        arguments = arguments[2 if arguments[0] in ("-X", "-W") else 1 :]
    path = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    own = [entry for entry in sys.path if entry.startswith((sys.prefix, sys.base_prefix))]
    first, *rest = arguments
    if first == "-c":
        sys.argv, sys.path[:] = ["-c", *rest[1:]], ["", *path, *own]
        module = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), module.__dict__)
    elif first == "-m":
        sys.argv, sys.path[:] = rest, [os.getcwd(), *path, *own]
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[:] = arguments, [os.path.dirname(os.path.realpath(first)), *path, *own]
        runpy.run_path(first, run_name="__main__")


def leave(code: int) -> None:
    """End this process as Python does, but for taking apart what the libraries hold, which costs half a
    second."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for file in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            file.flush()
    os._exit(code)


if __name__ == "__main__":
    leave(main(*sys.argv[1:]))
