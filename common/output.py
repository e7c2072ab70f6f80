"""A program's output: what cannot be written ends no program, and secrets are removed."""

from __future__ import annotations

import contextlib
import errno
import io
import math
import os
import select
import sys
import threading
from collections.abc import Iterator

from common.secrets import scrub_text

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""System error numbers for a file that cannot grow: the disk is full, or a quota or size limit is reached."""


def no_room(error: OSError) -> bool:
    """Return whether ``error`` says that a file cannot grow."""
    return error.errno in NO_ROOM


class _Forgiving(io.FileIO):
    """A file descriptor that drops the bytes which its file, pipe or terminal does not take, and those beyond
    ``left``."""

    left = math.inf

    def write(self, data: object) -> int:
        rest = memoryview(data).cast("B")  # type: ignore[arg-type]
        size, left = len(rest), self.left
        self.left -= size
        if size > left:
            rest = memoryview(_TOO_MUCH if left >= 0 else b"")
        with contextlib.suppress(OSError):
            while rest:
                written = super().write(rest)
                if written is None:  # a pipe that does not block is full
                    select.select([], [self], [])
                rest = rest[written or 0 :]
        return size


_TOO_MUCH = b"\n[this process has printed too much: the rest is dropped]\n"


class _Clean(io.TextIOWrapper):
    """A stream that removes secrets from what is printed: tracebacks and libraries quote settings too. On a
    terminal a bar makes room for a line."""

    def write(self, text: str) -> int:
        if _line.drawer != threading.get_ident() and text and self.isatty():
            if _line.drawn:
                super().write("\r\x1b[K")
            _line.drawn, _line.within = False, not text.endswith("\n")
        super().write(scrub_text(text))
        return len(text)


class _Line:
    """The last line of the terminal. ``drawer``: the thread that draws a bar at present; ``drawn``: whether
    there is a bar; ``within``: whether there is the beginning of a printed line."""

    drawer, drawn, within = 0, False, False


_line = _Line()


@contextlib.contextmanager
def drawing(visible: bool) -> Iterator[None]:
    """What this thread writes within is a bar. ``visible``: whether it stays on the last line."""
    _line.drawer = threading.get_ident()
    try:
        yield
    finally:
        _line.drawer, _line.drawn = 0, visible


def within_line() -> bool:
    """Return whether the end of the line on the terminal has not been printed yet."""
    return _line.within


def guard_output(most: float = math.inf) -> None:
    """From now on, remove secrets from what this program prints, drop it where it cannot be written (a full
    disk, a closed pipe or descriptor) or is beyond ``most`` bytes a stream, and escape letters that the
    output's encoding lacks: a log is not worth a run. Streams that somebody put in place of the process's own
    stay as they are."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        if stream is not getattr(sys, f"__{name}__"):
            continue
        if stream is None:  # closed at the start: what this program opens next must not get its number
            nothing = os.open(os.devnull, os.O_WRONLY)
            with contextlib.suppress(OSError):
                os.fstat(number)
                number = nothing
            os.dup2(nothing, number)
            os.set_inheritable(number, True)
        else:
            with contextlib.suppress(OSError):
                stream.flush()
            number = stream.fileno()
        raw = _Forgiving(number, "w", closefd=False)
        raw.left = most
        wrapped = _Clean(
            raw,  # type: ignore[arg-type]  # nothing waits in a buffer: it could not be dropped from there
            encoding="utf-8" if stream is None else stream.encoding,
            errors="backslashreplace",
            line_buffering=True,
            write_through=True,
        )
        setattr(sys, name, wrapped)
