"""A disk without room: files of this process that may not grow beyond a size, and a small disk that is
full."""

from __future__ import annotations

import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest


def set_limit(size: int | None) -> None:
    """Let no file of this process grow beyond ``size`` bytes; None: let them grow again."""
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most if size is None else size, most))


@contextmanager
def full_disk(size: int) -> Iterator[None]:
    set_limit(size)
    try:
        yield
    finally:
        set_limit(None)


FILLER = "filler"


def fill(folder: Path) -> None:
    """Leave no room on the disk of ``folder``, by a file of this name in it."""
    with (folder / FILLER).open("ab", buffering=0) as stream, suppress(OSError):
        while stream.write(bytes(4096)):
            continue


@contextmanager
def mounted(folder: Path, size: str) -> Iterator[Path]:
    """``folder`` as a disk of its own, of ``size`` (``16m``). Skips the test where this user may mount
    none."""
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True, text=True
    )
    if made.returncode:
        pytest.skip(f"may not mount a small disk: {made.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
