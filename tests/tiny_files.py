"""A disk that is full, as the kernel has it, and a folder as it is: for tests that import nothing heavy."""

from __future__ import annotations

import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@contextmanager
def limited(size: int) -> Iterator[None]:
    """No file of this process may grow beyond ``size`` bytes: writing more fails with an OSError, as on a
    full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def everything(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Relative path -> (when it was last written, ns; its content) of every file under ``folder``."""
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes())
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


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
