"""One-line descriptions of exceptions in user code, with the type, the message and the line of that code."""

from __future__ import annotations

import importlib
import os
import sysconfig
import traceback
from pathlib import Path

from common.errors import ConfigError
from common.worker_process import ROOT

LONGEST = 300
"""Most characters kept of an exception's message."""

_LIBRARIES = tuple(
    sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")
)
_CALLERS = (importlib.__file__, *(f"{ROOT / room}{os.sep}" for room in ("common", "rollouts")))
"""Files and folders that call the user's code. Their lines say nothing about the error."""


def describe(error: Exception) -> str:
    """Return ``ValueError: its message (file.py:12)`` in one line. The location is the deepest line of the
    traceback outside libraries."""
    message = error.remedy if isinstance(error, ConfigError) else str(error)
    words = " ".join(message.split())
    kind = "" if isinstance(error, ConfigError) else type(error).__name__
    where = _line(error.__cause__ if isinstance(error, ConfigError) and error.__cause__ else error)
    description = ": ".join(
        part for part in (kind, words if len(words) <= LONGEST else words[:LONGEST] + "…") if part
    )
    return description + (f" ({where})" if where else "")


def _line(error: BaseException) -> str | None:
    """Return ``file.py:12``, with a path relative to the working directory for a file inside it; None if the
    traceback contains only callers."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((*_CALLERS, "<"))
    ]
    user_frames = [frame for frame in frames if not frame.filename.startswith(_LIBRARIES)]
    if not frames:
        return None
    last = (user_frames or frames)[-1]
    inside = Path(last.filename).is_relative_to(Path.cwd())
    return f"{os.path.relpath(last.filename) if inside else last.filename}:{last.lineno}"
