"""A digest of a model's weights, whatever files they came from and however they are sharded."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from models.distributed import gather_objects
from models.shards import rows_of

_STEP, _FIRST, _SECOND = -7046029254386353131, -4658895280553007687, -7723592293110705685
"""Odd factors, modulo 2^64, of a position and of the two multiplications (Steele et al., 2014, SplitMix64)"""
_LOW = (1 << 32) - 1
_INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}
"""Bytes of an element -> the dtype that reads its bits."""
_AT_ONCE = {"cpu": 1 << 18, "cuda": 1 << 24}
"""Elements that are summed at once: as many as a core's cache holds, or enough to occupy a GPU."""


@torch.no_grad()
def weights_fingerprint(parameters: Iterable[tuple[str, Tensor]]) -> str:
    """Return a digest of every bit of the named weights, 32 hex digits.

    It is made of names, shapes, dtypes and, of each tensor, the sum of its bit patterns, each mixed with its
    position so that no changes cancel, modulo 2^64. So ranks add up the sums of their shards, and the digest
    is that of the whole tensors. If any tensor is sharded, every rank calls this.
    """
    named = list(parameters)
    sharded = [isinstance(tensor, DTensor) for _, tensor in named]
    sums = torch.stack([_own_sum(tensor.detach()).cpu() for _, tensor in named]).tolist() if named else []
    ranks = gather_objects(sums) if any(sharded) else [sums]
    digest = hashlib.sha256()
    for i, (name, tensor) in enumerate(named):
        total = sum(rank[i] for rank in ranks) if sharded[i] else sums[i]
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} {total % 2**64}\n".encode())
    return digest.hexdigest()[:32]


def _own_sum(tensor: Tensor) -> Tensor:
    """Return what this rank adds to the tensor's sum, [] int64. Of ranks that hold the same shard, the first
    adds it."""
    if not isinstance(tensor, DTensor):
        return _mixed_sum(tensor, 0)
    coordinates = tensor.device_mesh.get_coordinate()
    assert coordinates is not None, "every rank has a place in the mesh"
    if any(not isinstance(p, Shard) and c for p, c in zip(tensor.placements, coordinates, strict=True)):
        return torch.zeros((), dtype=torch.int64)
    return _mixed_sum(tensor.to_local(), rows_of(tensor).start * math.prod(tensor.shape[1:]))


def _mixed_sum(tensor: Tensor, start: int) -> Tensor:
    """Return the sum of the tensor's mixed bit patterns modulo 2^64, [] int64 on the tensor's device.
    ``start`` is the position of the first element."""
    flat = tensor.reshape(-1).contiguous()
    bits = flat.view(_INTEGERS[flat.element_size()])
    size = min(_AT_ONCE.get(bits.device.type, _AT_ONCE["cpu"]), bits.numel())
    places = torch.arange(size, device=bits.device) * _STEP
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for first in range(0, bits.numel(), max(1, size)):
        mixed = bits[first : first + size].to(torch.int64, copy=True)
        mixed += places[: len(mixed)]
        mixed += _signed((start + first) * _STEP)
        for factor in (_FIRST, _SECOND):
            mixed *= factor
            mixed ^= (mixed >> 32) & _LOW
        total += mixed.sum()
    return total


def _signed(number: int) -> int:
    """Return the int64 that equals ``number`` modulo 2^64."""
    return (number + 2**63) % 2**64 - 2**63
