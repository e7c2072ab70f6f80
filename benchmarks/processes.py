"""Programs that are started and surely ended."""

from __future__ import annotations

import contextlib
import subprocess

import psutil

GRACE = 20.0
"""Seconds that killed processes have to be gone."""


def end(process: subprocess.Popen[str]) -> None:
    """Kill the process and everything that it started, and wait until all of it is gone. A process group is
    not enough: torchrun gives every rank a session of its own."""
    started: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        started = psutil.Process(process.pid).children(recursive=True)
    if process.poll() is None:
        process.kill()
    for one in started:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    psutil.wait_procs(started, timeout=GRACE)
    process.wait()
