"""Accumulate token statistics of training steps on the device.

They are a histogram of the log-ratios, the number and position of tokens beyond the clipping range, and how
far the rows' log-probabilities have moved. Adding to them does not make the host wait, and no Python loop
runs over tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from data.types import Microbatch
from models.distributed import sum_over_ranks
from trainers.losses.base import token_sum

SIDES = ("chosen", "rejected", "neutral")
"""Chosen: chosen rows of pairs, desirable examples, completions of positive advantage. Rejected: their
opposites. Neutral: completions of advantage 0."""
OCTAVES = range(-20, 5)
EDGES = tuple(sign * 2.0**o for sign, octaves in ((-1, reversed(OCTAVES)), (1, OCTAVES)) for o in octaves)
"""Edges of the histogram's bins, nats: -16, -8 … -2^-20, 2^-20 … 8, 16. Log-ratios span many orders of
magnitude: a step's noise is 1e-6 in float32, a clipped token 1.5. A bin includes its upper edge; the outer
two bins are open."""
BINS = len(EDGES) + 1
POSITIONS = 16
"""Number of position bins. Bin p has the completion positions 2^p to 2^(p+1) - 1, counted from 1; the last
bin is open."""
SUMS = {"histogram": (len(SIDES), BINS), "positions": (len(SIDES), POSITIONS, 3), "sums": (len(SIDES), 6)}
"""Name of a tensor of sums -> its shape."""
DIGITS = 6
"""Significant digits of written numbers; further digits may change, as ranks sum in another order after a
restart."""


def sides(micro: Microbatch) -> Tensor:
    """Return the index in SIDES that each row belongs to, [R] int64."""
    n, device = len(micro.examples), micro.labels.device
    if len(micro.sequences.rows) == 2 * n:
        return torch.arange(2 * n, device=device) // n
    labels = micro.labels
    return torch.where(labels > 0, 0, torch.where(labels < 0, 1, 2))


class Tally:
    """Sums over the rows and tokens that this rank has seen since the last ``clear``. They are views of one
    flat tensor, so that one collective sums them over ranks; it is float64, in which counts are exact.

    ``low`` and ``high``: the clipping range of log-ratios, nats."""

    def __init__(self, low: float, high: float, device: torch.device) -> None:
        self.low, self.high = low, high
        self._edges = torch.tensor(EDGES, device=device)
        self._powers = 2 ** torch.arange(1, POSITIONS, device=device)
        sizes = sum(math.prod(shape) for shape in SUMS.values())
        self._all = torch.zeros(sizes, dtype=torch.float64, device=device)

    @property
    def parts(self) -> dict[str, Tensor]:
        """Views of this rank's sums by name; callers add to them in place."""
        return self.named(self._all)

    def clear(self) -> None:
        self._all.zero_()

    def copy(self) -> Tensor:
        return self._all.clone()

    def put_back(self, copy: Tensor) -> None:
        self._all.copy_(copy)

    def total(self) -> list[float]:
        """Return the sums over all ranks, the same on every rank. The host waits for the device."""
        out: list[float] = sum_over_ranks(self._all.clone()).tolist()
        return out

    def restore(self, total: Sequence[float], mine: bool) -> None:
        """Continue from ``total``, the sums over all ranks; the rank with ``mine`` takes them, the others 0.

        So the number of ranks may change."""
        self._all.copy_(torch.tensor(total, dtype=torch.float64) * mine)

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        """Return views of the flat tensor ``flat`` by name."""
        pieces = flat.split([math.prod(shape) for shape in SUMS.values()])
        return {name: piece.view(shape) for (name, shape), piece in zip(SUMS.items(), pieces, strict=True)}

    def add(self, side: Tensor, raw: Tensor, mask: Tensor, moved: Tensor, comparable: Tensor) -> None:
        """Add R rows.

        ``side``: [R] index in SIDES. ``raw``: [R, T] unclipped log-ratios, nats. ``mask``: [R, T] completion
        tokens. ``moved``: [R] the rows' log-probabilities now minus those under the initial weights, nats,
        valid where ``comparable`` [R] is true."""
        parts = self.parts
        counts = mask.double().flatten()
        bins = side[:, None] * BINS + torch.bucketize(raw, self._edges)
        parts["histogram"].view(-1).index_add_(0, bins.flatten(), counts)
        places = torch.bucketize(
            torch.arange(1, raw.shape[1] + 1, device=raw.device), self._powers, right=True
        )
        beyond = torch.stack(
            [counts, counts * (raw < self.low).flatten(), counts * (raw > self.high).flatten()], dim=1
        )
        parts["positions"].view(-1, 3).index_add_(0, (side[:, None] * POSITIONS + places).flatten(), beyond)
        tokens, exact = mask.sum(dim=-1), raw.double()
        rows = torch.stack(
            [
                mask.any(dim=-1),
                tokens,
                token_sum(exact, mask),
                token_sum(exact.square(), mask),
                torch.where(comparable, tokens, 0),
                torch.where(comparable, moved, 0.0),
            ],
            dim=1,
        ).double()
        parts["sums"] += (side == torch.arange(len(SIDES), device=side.device)[:, None]).double() @ rows

    def describe(self, total: Sequence[float]) -> dict[str, dict[str, Any]]:
        """Return ``total`` as plain data: side -> its counts and means, for each side that has rows."""
        parts = self.named(torch.tensor(total, dtype=torch.float64))
        out: dict[str, dict[str, Any]] = {}
        for s, name in enumerate(SIDES):
            rows, tokens, log_ratio, square, compared, moved = parts["sums"][s].tolist()
            if rows:
                out[name] = {
                    "rows": int(rows),
                    "tokens": int(tokens),
                    "length": rounded(tokens / rows),
                    "log_ratio": rounded(log_ratio / tokens),
                    "spread": rounded(math.sqrt(max(square, 0.0) / tokens)),
                    "drift": rounded(moved / compared) if compared else None,
                    "histogram": [int(n) for n in parts["histogram"][s].tolist()],
                    "positions": [
                        [int(n) for n in place] for place in parts["positions"][s].tolist() if place[0]
                    ],
                }
        return out


def rounded(value: float) -> float | None:
    """Return ``value`` rounded to DIGITS significant digits; None if it is not finite."""
    return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
