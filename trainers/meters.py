"""Metrics as sums and counts, added up over microbatches, reduced over ranks in one collective, and read one
step late.

Reading a device tensor makes the host wait for the device; a step never does so. ``Meters.reduce`` starts the
copy, and ``Pending.read`` is called when the next step is already under way.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from models.distributed import sum_over_ranks
from trainers.losses.base import Mean


class Pending:
    """Reduced metrics on their way to the host."""

    def __init__(self, names: list[str], values: Tensor) -> None:
        """``values``: [2, names] float64, the sums and the counts of the global batch."""
        self.names = names
        self.host = values.to("cpu", non_blocking=True)
        self.ready = torch.cuda.Event() if values.is_cuda else None
        if self.ready is not None:
            self.ready.record()

    def read(self) -> dict[str, float | None]:
        """Return the means; None where the count is 0 (for instance, no desirable example in the batch)."""
        if self.ready is not None:
            self.ready.synchronize()
        sums, counts = self.host.tolist()
        return {n: s / c if c else None for n, s, c in zip(self.names, sums, counts, strict=True)}


class Meters:
    """One step's metrics. Every rank adds the same names in the same order."""

    def __init__(self) -> None:
        self.parts: dict[str, list[Mean]] = {}

    def add(self, metrics: Mapping[str, Mean]) -> None:
        for name, value in metrics.items():
            self.parts.setdefault(name, []).append(value)

    def reduce(self) -> Pending:
        names = list(self.parts)
        sums = [torch.stack([r.sum.detach().double() for r in self.parts[n]]).sum() for n in names]
        counts = [torch.stack([r.count.detach().double() for r in self.parts[n]]).sum() for n in names]
        return Pending(names, sum_over_ranks(torch.stack([torch.stack(sums), torch.stack(counts)])))
