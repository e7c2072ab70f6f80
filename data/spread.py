"""The distribution of a number over a set, as quartiles and mean."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np


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
