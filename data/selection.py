"""Selection of the training groups that a run keeps, by how likely the initial model finds their completions
(``data.logprob_range``).

Figure 6 of the paper is run this way: a range of [0, 0.25] is its lowest quartile, [0.25, 1] the rest.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from common.errors import StoppedError


@dataclass(frozen=True)
class Spread:
    """The distribution of a number over a set: minimum, quartiles, maximum and mean."""

    count: int
    mean: float
    minimum: float
    lower_quartile: float
    median: float
    upper_quartile: float
    maximum: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread | None:
        """Return the spread of ``values`` in float64 (quartiles interpolated linearly); None if there are no
        values."""
        array = np.fromiter(values, dtype=np.float64)
        if not array.size:
            return None
        return cls(
            array.size, float(array.mean()), *(float(q) for q in np.quantile(array, (0, 0.25, 0.5, 0.75, 1)))
        )


@dataclass(frozen=True)
class Selection:
    """The groups that are trained on, and the numbers to report about the selection."""

    range: tuple[float, float]
    """data.logprob_range: shares of the groups in order of their mean token log-probability; 0 is the least
    likely"""
    kept: tuple[int, ...]
    """Indices of the kept groups, ascending, so that the data keep their order"""
    below: int
    """Groups left out because they are less likely"""
    above: int
    """Groups left out because they are more likely"""
    all: Spread
    """Mean token log-probability of every group in nats; its four quarters are Figure 6's quartiles"""
    lowest: float
    """Lowest mean token log-probability of the kept groups, in nats"""
    highest: float
    """Highest mean token log-probability of the kept groups, in nats"""

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON. Of the kept groups only their number is included."""
        return {**asdict(self), "kept": len(self.kept)}


def places(count: int, share: Seq[float]) -> tuple[int, int]:
    """Return the slice [first, last) of ``count`` groups in ascending order to which the range ``share``
    corresponds. Adjacent ranges share no group and leave none out between them."""
    first, last = (math.floor(end * count + 0.5) for end in share)
    return first, last


def select(values: np.ndarray, share: Seq[float]) -> Selection:
    """Return the selection of groups by ``values`` [groups], their mean token log-probabilities in nats. Of
    equal values, the earlier group counts as less likely.

    Raises StoppedError if a value is not a finite number, because such a group has no place in the order.
    """
    if not np.isfinite(values).all():
        raise StoppedError(
            f"the initial weights give {int((~np.isfinite(values)).sum())} of {len(values)} training groups "
            "no finite "
            "log-probability, so data.logprob_range cannot order them; look at the model "
            "(model.dtype=float32?)"
        )
    first, last = places(len(values), share)
    order = np.argsort(values, kind="stable")
    kept = np.sort(order[first:last])
    spread = Spread.of(values)
    assert spread is not None and len(kept)  # make_plan checks it
    return Selection(
        (float(share[0]), float(share[1])),
        tuple(kept.tolist()),
        first,
        len(values) - last,
        spread,
        float(values[order[first]]),
        float(values[order[last - 1]]),
    )
