"""A program's output: what does not fit on a full disk is dropped, and secrets are removed."""

from __future__ import annotations

import errno
import io
import math
import sys

from common.secrets import scrub_text

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""System error numbers for a file that cannot grow: the disk is full, or a quota or size limit is reached."""


def no_room(error: OSError) -> bool:
    """Return whether ``error`` says that a file cannot grow."""
    return error.errno in NO_ROOM


class _Forgiving(io.FileIO):
    """A file descriptor that drops the bytes that no longer fit on the disk, and those beyond ``left``."""

    left = math.inf

    def write(self, data: object) -> int:
        rest = memoryview(data).cast("B")  # type: ignore[arg-type]
        size, left = len(rest), self.left
        self.left -= size
        if size > left:
            rest = memoryview(_TOO_MUCH if left >= 0 else b"")
        try:
            while rest:
                rest = rest[super().write(rest) or 0 :]
        except OSError as error:
            if not no_room(error):
                raise
        return size


_TOO_MUCH = b"\n[this process has printed too much: the rest is dropped]\n"


class _Clean(io.TextIOWrapper):
    """A stream that removes secrets from what is printed: tracebacks and libraries quote settings too."""

    def write(self, text: str) -> int:
        super().write(scrub_text(text))
        return len(text)


def guard_output(most: float = math.inf) -> None:
    """From now on, remove secrets from what this program prints. What it prints into a file on a full disk is
    dropped instead of failing: a log is not worth a run. So is what is beyond ``most`` bytes a stream."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        stream.flush()
        raw = _Forgiving(stream.fileno(), "w", closefd=False)
        raw.left = most
        wrapped = _Clean(
            raw,  # type: ignore[arg-type]  # nothing waits in a buffer: it could not be dropped from there
            encoding=stream.encoding,
            errors=stream.errors,
            line_buffering=True,
            write_through=True,
        )
        setattr(sys, name, wrapped)
