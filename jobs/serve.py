"""Start vLLM servers on this machine for a run to sample with (``sampler.urls``), by that run's settings.

    python -m jobs.serve loss=kto online=true sampler=vllm                # prints their addresses; Ctrl-C ends them
    python -m jobs.serve --ready addresses.txt loss=kto online=true sampler=vllm

The other words are the settings of ``train.py``. One server is started for each group of
``sampler.tensor_parallel`` GPUs that this process sees, or a single server where there is no GPU. The exit
code is 1 when a server ends by itself.
"""  # noqa: E501

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from common.errors import StoppedError, require
from common.files import write_whole
from common.ports import free_port
from common.worker_process import ROOT
from config.cli import compose, guarded
from config.schema import Config

ANY = "http://localhost:8000"
"""Placeholder address, to check settings before the servers have addresses."""
PAUSE_S = 0.5


def server_words(config: Config, port: int) -> tuple[list[str], dict[str, str]]:
    """Return the command that starts a server for a run of these settings, and its environment variables.

    The variables override those of this process."""
    import torch

    from models.weight_files import resolve_model_path
    from rollouts.adapters import base_of_adapters, with_adapters
    from rollouts.transfer import chosen
    from rollouts.vllm_options import engine_options
    from rollouts.vllm_server import serve_command

    model, device = config.model, torch.device("cuda" if torch.cuda.is_available() else "cpu")
    options = engine_options(config.sampler, model.max_length, model.dtype, model.logit_temperature)
    path, backend = str(resolve_model_path(model.name_or_path)), chosen(config.sampler, device)
    if base_of_adapters(config) is not None:
        options = with_adapters(options, model)
    words = serve_command(path, options, backend, port, device.type == "cpu")
    program = words.index("python")
    own = dict(word.split("=", 1) for word in words[1:program])
    own["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    own["VLLM_NO_USAGE_STATS"] = "1"
    return [sys.executable, *words[program + 1 :]], own


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


def own_name() -> str:
    """Return this machine's host name, or its IP address if the name cannot be resolved."""
    name = socket.gethostname()
    try:
        socket.gethostbyname(name)
        return name
    except OSError:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
            try:
                asked.connect(("192.0.2.1", 9))  # a documentation address (RFC 5737): nothing is sent
                return str(asked.getsockname()[0])
            except OSError:
                return "127.0.0.1"


@contextmanager
def servers(config: Config, host: str) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """Start the servers and yield their processes by address; kill them at the end."""
    from rollouts.vllm_options import KV_CACHE

    started: dict[str, subprocess.Popen[bytes]] = {}
    theirs = {name: value for name, value in os.environ.items() if name != KV_CACHE}
    try:
        for share in shares(seen_gpus(), config.sampler.tensor_parallel):
            port = free_port()
            words, own = server_words(config, port)
            if share is not None:
                own["CUDA_VISIBLE_DEVICES"] = share
            started[f"http://{host}:{port}"] = subprocess.Popen(
                words, cwd=ROOT, env=theirs | own, start_new_session=True
            )
        yield started
    finally:
        for process in started.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # also kills the engines that it has started
                process.wait()


def refuse_ended(started: dict[str, subprocess.Popen[bytes]]) -> None:
    """Raise StoppedError if a server has ended."""
    for url, process in started.items():
        if (code := process.poll()) is not None:
            raise StoppedError(f"the vLLM server at {url} ended with exit code {code}: it said why above")


def serve(words: Sequence[str], ready: Path | None, host: str) -> None:
    """Start the servers, write their addresses, one per line, once all answer, and then wait.

    Raises ConfigError for settings whose run would not sample with the servers, and StoppedError when one
    ends."""
    from rollouts.vllm_sampler import require_installed
    from rollouts.vllm_server import alive

    run, _ = compose(*words)
    require(run.online, "online", run.online, "samples nothing: give online=true")
    require(run.sampler.separate, "sampler", run.sampler.name, "samples in the run itself: give sampler=vllm")
    config, _ = compose(*words, f"sampler.urls=[{ANY}]")
    require_installed()
    if ready is not None:
        require(
            ready.absolute().parent.is_dir(), "--ready", ready, "is in no folder that is there: make it first"
        )
    with servers(config, host) as started:
        waiting = list(started)
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


def main(words: Sequence[str] | None = None) -> None:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m jobs.serve", description=__doc__, formatter_class=form)
    parser.add_argument("settings", nargs="*", help="key=value, as for train.py")
    parser.add_argument("--ready", type=Path, metavar="FILE", help="gets the addresses once all answer")
    parser.add_argument(
        "--host", default=own_name(), help="this machine, as the trainer reaches it (%(default)s)"
    )
    given = parser.parse_intermixed_args(words)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        guarded(lambda: serve(given.settings, given.ready, given.host))
    except KeyboardInterrupt:
        sys.exit(0)


if __name__ == "__main__":
    main()
