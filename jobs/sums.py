"""Sums on the device that are added to in every step and read by the host now and then."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from models.distributed import sum_over_ranks


class Sums:
    """Named tensors of sums over what this rank has seen since the last ``clear``: one flat tensor, so that
    one collective sums it, in float64, in which counts are exact."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], device: torch.device) -> None:
        self._shapes = dict(shapes)
        self._all = torch.zeros(
            sum(math.prod(shape) for shape in shapes.values()), dtype=torch.float64, device=device
        )

    @property
    def parts(self) -> dict[str, Tensor]:
        """Views of this rank's sums by name, to be added to."""
        return self.named(self._all)

    def clear(self) -> None:
        self._all.zero_()

    def total(self) -> list[float]:
        """The sums over all ranks, on every rank. The host waits."""
        out: list[float] = sum_over_ranks(self._all.clone()).tolist()
        return out

    def restore(self, total: Sequence[float], mine: bool) -> None:
        """Go on from ``total``, which one rank (``mine``) takes over, however many there were."""
        self._all.copy_(torch.tensor(total, dtype=torch.float64) * mine)

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        """Views of one flat tensor."""
        pieces = flat.split([math.prod(shape) for shape in self._shapes.values()])
        return {
            name: piece.view(shape) for (name, shape), piece in zip(self._shapes.items(), pieces, strict=True)
        }
