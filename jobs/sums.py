"""Sums on the device that grow in every step and that the host reads only occasionally."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from models.distributed import sum_over_ranks


class Sums:
    """Named tensors of sums over the data that this rank has seen since the last ``clear``.

    They are views of one flat tensor, so that one collective sums them over ranks. It is float64, in which
    counts are exact."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], device: torch.device) -> None:
        self._shapes = dict(shapes)
        self._all = torch.zeros(
            sum(math.prod(shape) for shape in shapes.values()), dtype=torch.float64, device=device
        )

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
        pieces = flat.split([math.prod(shape) for shape in self._shapes.values()])
        return {
            name: piece.view(shape) for (name, shape), piece in zip(self._shapes.items(), pieces, strict=True)
        }
