"""Prospect theory (Tversky and Kahneman 1992), how people value outcomes and weigh their chances (equations 2
to 4 of the paper).

An outcome may be money, or the surprisal of a completion in nats (section 3). Everything here is a pure
function of float64 arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]
Capacity = Callable[[Array], Array]
"""Maps cumulative probabilities to perceived ones, elementwise; increasing, with 0 -> 0 and 1 -> 1."""

LAMBDA, ALPHA = 2.25, 0.88
"""Median loss aversion and risk aversion of Tversky and Kahneman's subjects."""


def value(z: ArrayLike, lam: float = LAMBDA, alpha: float = ALPHA, z0: float = 0.0) -> Array:
    """Return ``(z - z0)^alpha`` for gains and ``-lambda (z0 - z)^alpha`` for losses (equation 2). Any
    shape."""
    distance = np.asarray(z, dtype=np.float64) - z0
    return np.where(distance >= 0, 1.0, -lam) * np.abs(distance) ** alpha


def capacity(a: ArrayLike, gamma: float) -> Array:
    """Return ``a^gamma / (a^gamma + (1 - a)^gamma)^(1 / gamma)`` (equation 3). ``a``: cumulative
    probabilities in [0, 1], any shape.

    ``gamma``: 1 gives the objective probabilities; a value below 1 gives the inverted S of most people.
    Raises ValueError unless ``gamma`` is above 0.
    """
    if gamma <= 0:
        raise ValueError(f"gamma={gamma}: must be above 0")
    p = np.asarray(a, dtype=np.float64)
    return p**gamma / (p**gamma + (1 - p) ** gamma) ** (1 / gamma)


GAINS, LOSSES = partial(capacity, gamma=0.61), partial(capacity, gamma=0.69)
"""The median capacity functions of Tversky and Kahneman's subjects."""


def decision_weights(
    outcomes: ArrayLike,
    probabilities: ArrayLike,
    *,
    z0: float = 0.0,
    gains: Capacity = GAINS,
    losses: Capacity = LOSSES,
) -> Array:
    """Return the weight of each outcome, [n], in the order given (equation 4).

    ``outcomes``: [n], in any order. ``probabilities``: [n], of sum 1. The weight of a gain (``>= z0``) is the
    capacity of doing as well or better minus the capacity of doing better; the weight of a loss is the
    capacity of doing as badly or worse minus that of doing worse. Each side has its own capacity function.
    Equal outcomes count as one outcome, whose weight they share in proportion to their probabilities. The
    weights of a prospect with both gains and losses need not add up to 1. Raises ValueError for invalid
    probabilities.
    """
    z, p = np.asarray(outcomes, dtype=np.float64), np.asarray(probabilities, dtype=np.float64)
    if z.shape != p.shape or z.ndim != 1 or (p < 0).any() or not np.isclose(p.sum(), 1.0):
        raise ValueError(f"probabilities {p} of outcomes {z}: give one for each, none negative, of sum 1")
    distinct, group = np.unique(z, return_inverse=True)
    mass: Array = np.bincount(group, weights=p).astype(np.float64)
    gain = distinct >= z0
    weight = np.concatenate([_differences(mass[~gain], losses), _differences(mass[gain][::-1], gains)[::-1]])
    share = np.divide(p, mass[group], out=np.zeros_like(p), where=mass[group] > 0)
    return weight[group] * share


def _differences(mass: Array, perceived: Capacity) -> Array:
    """Return the capacity of each cumulative probability minus that of the one before, from the most extreme
    outcome inwards."""
    cumulative = np.concatenate([[0.0], np.cumsum(mass)])
    # Capacity is infinitely steep at 1: a sum's rounding error of 1e-16 there would become 1e-6 of weight.
    return np.diff(perceived(np.where(cumulative > 1 - 1e-12, 1.0, cumulative)))
