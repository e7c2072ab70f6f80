"""A rank's part of a sharded tensor, and tensors that are sharded in the same way as a parameter."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def sharded_like(p: Tensor, made: Tensor) -> Tensor:
    """Return the whole tensor of which ``made`` is this rank's part, sharded like ``p``. It has the shape of
    ``p`` except in its last dimension. Where ``p`` is not sharded, return ``made`` itself."""
    if not isinstance(p, DTensor):
        return made
    shape = torch.Size((*p.shape[:-1], made.shape[-1]))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(made, p.device_mesh, p.placements, run_check=False, shape=shape, stride=stride)


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of ``tensor``."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def rows_of(tensor: DTensor) -> slice:
    """Return which rows of the whole tensor are this rank's part."""
    assert not any(isinstance(p, Shard) and p.dim for p in tensor.placements), (
        "FSDP shards the first dimension"
    )
    shape, first = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return slice(first[0], first[0] + shape[0])
