"""A check with its verdict, as ``benchmarks.gpu_check`` prints and keeps it."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

SHAPE_NAMES = ("tiny", "small", "qwen2.5-1.5b", "llama-3-8b")
"""Architectures that the programs can make (``benchmarks.parts.shape``)."""
OK, NOTE, FAILED, NOT_HERE = "ok", "note", "FAILED", "not here"
"""Verdicts. NOTE: nothing is wrong, but the reader should know. NOT_HERE: what it checks does not exist on
this machine."""


@dataclass(frozen=True)
class Check:
    """What was found about one path of the code."""

    name: str
    verdict: str
    text: str
    numbers: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.verdict:<9}{self.name:<34}{self.text}"


def within(name: str, text: str, numbers: dict[str, float], limits: dict[str, float]) -> Check:
    """Return a check that fails if any of ``numbers`` is above its limit or is not a number. ``text`` says
    what was compared."""
    off = [key for key, limit in limits.items() if not numbers[key] <= limit]
    said = ", ".join(f"{key} {numbers[key]:.2g} (limit {limit:.2g})" for key, limit in limits.items())
    return Check(name, FAILED if off else OK, f"{text}: {said}", dict(numbers))


def attempted(name: str, work: Callable[[], Check], absent: type[Exception] | None = None) -> Check:
    """Return what ``work`` finds, or that it failed. A report of every path is worth more than a program that
    ends at the first broken one, so any exception is a finding here. ``absent``: the exception that says that
    something is not installed."""
    try:
        return work()
    except Exception as error:
        if absent is not None and isinstance(error, absent):
            return Check(name, NOT_HERE, str(error).partition("\n")[0])
        return failed(name, error)


def failed(name: str, error: Exception) -> Check:
    """Return the check of a path that raised ``error``, with its traceback among the numbers."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    more = f" … {lines[-1]}" if lines[-1] not in lines[0] else ""
    said = "".join(traceback.format_exception(error))
    return Check(name, FAILED, f"{type(error).__name__}: {lines[0]}{more}", {"traceback": said})


def written(checks: Iterable[Check], path: Path | None) -> Iterator[Check]:
    """Yield the checks as they are made, each after it was appended to ``path`` as a line of JSON."""
    for check in checks:
        if path is not None:
            with path.open("a") as file:
                file.write(json.dumps(asdict(check)) + "\n")
        yield check


def read_checks(path: Path) -> list[Check]:
    """Return the checks of a file that ``written`` made, or is about to make; none if it is not there."""
    if not path.exists():
        return []
    whole = path.read_text().rpartition("\n")[0]
    return [Check(**json.loads(line)) for line in whole.splitlines()]
