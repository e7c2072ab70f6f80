"""The parts of the memory that a rank takes, and the card that they must fit on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from jobs.memory_neighbours import GIB
from jobs.memory_simulation import Answer, evaluates

GAPS = 0.05
"""Share of a card that is reserved for fragmentation by the allocator."""
ORDER = (
    "weights",
    "reference",
    "optimizer",
    "gradients",
    "gathered blocks",
    "activations",
    "work",
    "head",
    "communication",
)


@dataclass(frozen=True)
class Card:
    name: str
    memory: float
    """GiB"""

    @property
    def room(self) -> float:
        """GiB that a plan may use."""
        return self.memory * (1 - GAPS)


@dataclass(frozen=True)
class Situation:
    """The memory that a rank holds at once during one activity, such as a training step."""

    name: str
    parts: Mapping[str, float]
    """Part -> GiB"""

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    def __str__(self) -> str:
        digits = 2 if self.total >= 1 else 4
        shown = [f"{part} {size:.{digits}f}" for part, size in self.parts.items() if round(size, digits)]
        return f"{self.name}: {self.total:.{digits}f} GiB = " + " + ".join(shown)


def peak(given: Answer, evaluation: bool) -> dict[str, int]:
    """Return bytes by part at the moment of the largest sum.

    ``evaluation``: consider the moments of the evaluation instead of those of the training step."""
    moments: Iterable[dict[str, int]] = (
        parts for moment, parts in given.peaks.items() if evaluates(moment) is evaluation
    )
    return max(moments, key=lambda parts: sum(parts.values()))


def largest(given: Answer, evaluation: bool) -> dict[str, float]:
    return in_gib(peak(given, evaluation))


def in_gib(parts: Mapping[str, int]) -> dict[str, float]:
    return {part: parts[part] / GIB for part in ORDER if parts.get(part)}
