"""Extend a run beyond its planned length when it is resumed.

The original plan stays unchanged. Each extension is a stretch of its own, trained at the final learning rate
of a constant schedule.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from common.errors import ConfigError
from common.files import read_sealed, sealed, write_whole
from config.record import LENGTH, settings_before, started
from config.schema import Config
from data.batches import Segment

LENGTHS = "lengths.json"
"""File of an extended run that holds the total number of examples planned at each extension."""


def examples_of(n_epochs: int | None, n_examples: int | None, count: int) -> int:
    """Return the total number of examples that a run trains on; ``count``: examples in one epoch."""
    units = (n_epochs or 10**9) * count
    return min(units, n_examples or units)


def planned(folder: Path, config: Config, count: int) -> tuple[int, ...]:
    """Return the total number of examples at the end of each stretch of the run in ``folder``.

    The last number is the one that ``config`` gives; a run of one stretch gives (). ``count``: examples in
    one epoch. Raises ConfigError where the run would be shorter than planned.
    """
    before = settings_before(folder) if started(folder) else {}
    if config.online or not before:
        return ()
    given = {key: before.get(key) for key in LENGTH}
    ends = _recorded(folder) or [examples_of(given["n_epochs"], given["n_examples"], count)]
    now = examples_of(config.n_epochs, config.n_examples, count)
    if now < ends[-1]:
        key = next((key for key in LENGTH if given[key] != getattr(config, key)), "n_epochs")
        raise ConfigError(
            key,
            getattr(config, key),
            f"was {given[key]} when the run in {folder} was started: that are {ends[-1]} examples, and these "
            f"would be {now}; a run may be made longer, not shorter. {key}={given[key]} goes on",
        )
    ends = [*ends, now] if now > ends[-1] else ends
    return tuple(ends) if len(ends) > 1 else ()


def _recorded(folder: Path) -> list[int]:
    """Return the numbers in the LENGTHS file; [] if there is no such file.

    Raises ConfigError if the file is damaged."""
    path = folder / LENGTHS
    if not path.exists():
        return []
    try:
        lengths: Any = read_sealed(path)["examples"]
        if isinstance(lengths, list) and lengths and all(isinstance(n, int) for n in lengths):
            return lengths
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise ConfigError(
        "exp_name", folder.name, f"{path} is damaged: it says how long the run was; put it back"
    )


def write(folder: Path, ends: tuple[int, ...]) -> None:
    """Write the stretches to the LENGTHS file; a run of one stretch writes nothing."""
    if ends:
        write_whole(folder / LENGTHS, sealed({"examples": list(ends)}))


def stretches(whole: Segment, ends: tuple[int, ...]) -> tuple[Segment, ...]:
    """Return the run as segments: ``whole`` alone without ``ends``, else one segment per stretch.

    The first stretch is the original plan with its warm-up. Each further stretch is shuffled anew and lies
    at the end of the schedule (progress 1)."""
    if not ends:
        return (whole,)
    first = replace(whole, n_examples=ends[0])
    added = [
        replace(whole, n_examples=end - begin, index=i, start=1.0, end=1.0)
        for i, (begin, end) in enumerate(pairwise(ends), 1)
    ]
    return (first, *added)
