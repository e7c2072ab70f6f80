"""Start vLLM servers on this machine for a run to sample with (``sampler.urls``), by that run's settings.

    python -m jobs.serve loss=kto online=true sampler=vllm                # prints their addresses; Ctrl-C ends them
    python -m jobs.serve --trainer node1 --ready addresses.txt loss=kto online=true sampler=vllm

The other words are the settings of ``train.py``. One server is started for each group of
``sampler.tensor_parallel`` GPUs that this process sees, or a single server where there is no GPU. They listen
at sockets that only this user's programs on this machine reach. For a trainer on another machine
(``--trainer``) they listen at ports, and answer nobody who does not show the key in ``cache_dir``, as the run
does. They end with this program, however it ends. The exit code is 1 when a server ends by itself.
"""  # noqa: E501

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from common.errors import ConfigError, StoppedError, require
from common.files import write_whole
from common.options import options_of
from common.ports import free_port
from common.progress import phase, pulse
from common.worker_process import ROOT
from config.cli import compose, guarded
from config.schema import Config

ANY = "http://localhost:8000"
"""Placeholder address, to check settings before the servers have addresses."""
PAUSE_S = 0.5
PRIVATE = "humanline-"


def server_words(config: Config, url: str) -> tuple[list[str], dict[str, str]]:
    """Return the command that starts a server at ``url`` for a run of these settings, and ends it with this
    process, and its environment variables, which override those of this process."""
    import torch

    from models.weight_files import resolve_model_path
    from rollouts.vllm.adapters import base_of_adapters, with_adapters
    from rollouts.vllm.key import key_file
    from rollouts.vllm.options import engine_options
    from rollouts.vllm.server import serve_command
    from rollouts.vllm.transfer import chosen

    model, device = config.model, torch.device("cuda" if torch.cuda.is_available() else "cpu")
    options = engine_options(config.sampler, model.max_length, model.dtype, model.logit_temperature)
    path, backend = str(resolve_model_path(model.name_or_path)), chosen(config.sampler, device)
    if base_of_adapters(config) is not None:
        options = with_adapters(options, model)
    file = str(key_file(config.cache_dir))
    words = serve_command(url, path, options, backend, device.type == "cpu", file)
    program = words.index("python")
    own = dict(word.split("=", 1) for word in words[1:program])
    own["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    own["VLLM_NO_USAGE_STATS"] = "1"
    return [sys.executable, "-m", "common.worker_process", str(os.getpid()), *words[program + 2 :]], own


def shares(gpus: Sequence[str], each: int) -> list[str | None]:
    """Return CUDA_VISIBLE_DEVICES for each server of ``each`` GPUs; a single None without GPUs.

    Raises ConfigError if GPUs would be left over."""
    if not gpus:
        return [None]
    require(
        len(gpus) % each == 0,
        "sampler.tensor_parallel",
        each,
        f"does not divide the {len(gpus)} GPUs that are seen here (CUDA_VISIBLE_DEVICES says which)",
    )
    return [",".join(gpus[at : at + each]) for at in range(0, len(gpus), each)]


def seen_gpus() -> list[str]:
    """Return the names, as in CUDA_VISIBLE_DEVICES, of the GPUs that this process may use."""
    import torch

    given = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return given or [str(index) for index in range(torch.cuda.device_count())]


@contextmanager
def private_folder() -> Iterator[str]:
    """Make a folder of mode 0700 that is locked while this process lives. Those of processes that were killed
    are removed: folders of this user and mode that nobody has locked, with nothing but sockets in them."""
    for left in Path(tempfile.gettempdir()).glob(f"{PRIVATE}*"):
        with suppress(OSError):
            _remove(left)
    while True:
        folder = tempfile.mkdtemp(prefix=PRIVATE)
        with suppress(FileNotFoundError):  # another start has just taken it for one that was left
            lock = os.open(folder, os.O_RDONLY)
            fcntl.flock(lock, fcntl.LOCK_EX)
            os.stat(folder)
            break
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _remove(left: Path) -> None:
    """Remove a folder that a killed process left. Raises OSError for one that is in use or holds a file."""
    lock = os.open(left, os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY)
    try:
        about = os.fstat(lock)
        if about.st_uid == os.getuid() and stat.S_IMODE(about.st_mode) == 0o700:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for path in left.iterdir():
                if path.is_socket():
                    path.unlink()
            left.rmdir()
    finally:
        os.close(lock)


@contextmanager
def servers(config: Config, host: str | None) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """Start the servers and yield their processes by address; kill them at the end. ``host``: the address of
    this machine at whose ports they listen; None: they listen at sockets in a folder of this user's alone."""
    from rollouts.rewards.endpoint import UNIX
    from rollouts.vllm.options import KV_CACHE

    started: dict[str, subprocess.Popen[bytes]] = {}
    theirs = {name: value for name, value in os.environ.items() if name != KV_CACHE}
    with private_folder() as folder:
        try:
            for index, share in enumerate(shares(seen_gpus(), config.sampler.tensor_parallel)):
                url = f"{UNIX}{folder}/{index}" if host is None else f"http://{host}:{free_port()}"
                words, own = server_words(config, url)
                if share is not None:
                    own["CUDA_VISIBLE_DEVICES"] = share
                started[url] = subprocess.Popen(words, cwd=ROOT, env=theirs | own, start_new_session=True)
            yield started
        finally:
            for process in started.values():
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # also kills the engines that it has started
                process.wait()


def refuse_ended(started: dict[str, subprocess.Popen[bytes]]) -> None:
    """Raise StoppedError if a server has ended."""
    for url, process in started.items():
        if (code := process.poll()) is not None:
            raise StoppedError(f"the vLLM server at {url} ended with exit code {code}: it said why above")


def serve(words: Sequence[str], ready: Path | None, host: str | None) -> None:
    """Start the servers, write their addresses, one per line, once all answer, and then wait.

    Raises ConfigError for settings whose run would not sample with the servers, and StoppedError when one
    ends."""
    if ready is not None:
        there = ready.absolute().parent.is_dir() and not ready.is_dir()
        require(there, "--ready", ready, "is in no folder that is there, or is one: make it first")
    run, _ = compose(*words)
    require(run.online, "online", run.online, "samples nothing: give online=true")
    require(run.sampler.separate, "sampler", run.sampler.name, "samples in the run itself: give sampler=vllm")
    config, _ = compose(*words, f"sampler.urls=[{ANY}]")
    from rollouts.vllm.sampler import require_installed  # torch, which wrong settings are spared
    from rollouts.vllm.server import alive

    require_installed()
    if host is not None:
        try:
            socket.create_server((host, 0)).close()
        except OSError as error:
            said = f"is no address of this machine at which a server may listen ({error.strerror})"
            raise ConfigError("--host", host, said) from error
    with servers(config, host) as started:
        waiting = list(started)
        with phase("the vLLM servers start"):
            while waiting:
                refuse_ended(started)
                time.sleep(PAUSE_S)
                waiting = [url for url in waiting if not alive(url)]
        print(f"sampler.urls=[{','.join(started)}]", flush=True)
        if ready is not None:
            write_whole(ready, "".join(f"{url}\n" for url in started))
        while True:
            refuse_ended(started)
            time.sleep(PAUSE_S)


def towards(trainer: str | None) -> str | None:
    """Return this machine's address as the trainer's host sees it; None without one."""
    from rollouts.vllm.server import address_towards

    return None if trainer is None else address_towards(trainer)


def main(words: Sequence[str] | None = None) -> None:
    parser = options_of("python -m jobs.serve", __doc__)
    parser.add_argument("settings", nargs="*", help="key=value, as for train.py")
    parser.add_argument("--ready", type=Path, metavar="FILE", help="gets the addresses once all answer")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--host", metavar="ADDRESS", help="listen at ports of this address of this machine")
    where.add_argument("--trainer", metavar="HOST", help="listen at ports of the address that HOST reaches")
    given = parser.parse_intermixed_args(words)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))

    def work() -> None:
        with suppress(KeyboardInterrupt):  # the way to end it
            serve(given.settings, given.ready, given.host or towards(given.trainer))

    guarded(work)


if __name__ == "__main__":
    pulse()
    main()
