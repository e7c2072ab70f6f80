"""Tensors that are sharded as a parameter is."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def sharded_like(p: Tensor, made: Tensor) -> Tensor:
    """``made``, this rank's part of a tensor that differs from ``p`` in its last dimension alone, as that
    tensor, sharded like ``p``; ``made`` itself where ``p`` is not sharded."""
    if not isinstance(p, DTensor):
        return made
    shape = torch.Size((*p.shape[:-1], made.shape[-1]))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(made, p.device_mesh, p.placements, run_check=False, shape=shape, stride=stride)
