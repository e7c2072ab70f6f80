"""Handling of a disk that is full while a program prints its output."""

from __future__ import annotations

import errno
import io
import sys

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""System error numbers for a file that cannot grow: the disk is full, or a quota or size limit is reached."""


def no_room(error: OSError) -> bool:
    """Return whether ``error`` says that a file cannot grow."""
    return error.errno in NO_ROOM


class _Forgiving(io.FileIO):
    """A file descriptor that drops the bytes that no longer fit on the disk."""

    def write(self, data: object) -> int:
        rest = memoryview(data).cast("B")  # type: ignore[arg-type]
        size = len(rest)
        try:
            while rest:
                rest = rest[super().write(rest) or 0 :]
        except OSError as error:
            if not no_room(error):
                raise
        return size


def forgive_output() -> None:
    """From now on, drop what this program prints into a file on a full disk instead of failing: a log is not
    worth a run."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        stream.flush()
        raw = _Forgiving(stream.fileno(), "w", closefd=False)
        wrapped = io.TextIOWrapper(
            raw,  # type: ignore[arg-type]  # nothing waits in a buffer: it could not be dropped from there
            encoding=stream.encoding,
            errors=stream.errors,
            line_buffering=True,
            write_through=True,
        )
        setattr(sys, name, wrapped)
