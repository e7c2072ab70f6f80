"""A program's output, on a disk that may be full."""

from __future__ import annotations

import errno
import io
import sys

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What the system says where a file may not grow: the disk is full, a quota or a limit is used up."""


def no_room(error: OSError) -> bool:
    """Whether ``error`` is that of a file which may not grow."""
    return error.errno in NO_ROOM


class _Forgiving(io.FileIO):
    """A file descriptor that drops what it has no room for."""

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
    """From now on, what this program prints into a file without room is lost and the program goes on: a log
    is not worth a run."""
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
