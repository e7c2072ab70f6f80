"""Digests of a model: of its weights, whatever files they came from and however they are sharded, and of what
decides its outputs besides, its config and the code that comes with it."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from common.files import files_digest
from config.schema_model import ModelConfig
from models.distributed import ended_together, gather_objects
from models.pretrained import model_config
from models.sharding import rows_of

_STEP, _FIRST, _SECOND = -7046029254386353131, -4658895280553007687, -7723592293110705685
"""Odd factors, modulo 2^64, of a position and of the two multiplications (Steele et al., 2014, SplitMix64)"""
_LOW = (1 << 32) - 1
_INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}
"""Bytes of an element -> the dtype that reads its bits."""
_AT_ONCE = {"cpu": 1 << 18, "cuda": 1 << 24}
"""Elements that are summed at once: as many as a core's cache holds, or enough to occupy a GPU."""


@ended_together()
def weights_fingerprint(parameters: Iterable[tuple[str, Tensor]]) -> str:
    """Return a digest of every bit of the named weights, 32 hex digits.

    It is made of names, shapes, dtypes and, of each tensor, the sum of its bit patterns, each mixed with its
    position so that no changes cancel, modulo 2^64. So ranks add up the sums of their shards, and the digest
    is that of the whole tensors. If any tensor is sharded, every rank calls this.
    """
    named = list(parameters)
    sharded = [isinstance(tensor, DTensor) for _, tensor in named]
    sums = torch.stack([_rank_sum(tensor.detach()).cpu() for _, tensor in named]).tolist() if named else []
    ranks = gather_objects(sums) if any(sharded) else [sums]
    digest = hashlib.sha256()
    for i, (name, tensor) in enumerate(named):
        total = sum(rank[i] for rank in ranks) if sharded[i] else sums[i]
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} {total % 2**64}\n".encode())
    return digest.hexdigest()[:32]


def _rank_sum(tensor: Tensor) -> Tensor:
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
        mixed += ((start + first) * _STEP + 2**63) % 2**64 - 2**63  # the int64 that equals it modulo 2^64
        for factor in (_FIRST, _SECOND):
            mixed *= factor
            mixed ^= (mixed >> 32) & _LOW
        total += mixed.sum()
    return total


WITHOUT_EFFECT = frozenset(
    {"_name_or_path", "_commit_hash", "transformers_version", "dtype", "torch_dtype", "architectures"}
)
"""Fields of a config, of a model within it too, that change no output: where it came from and what wrote it,
the dtype in which its files are stored (``model.dtype`` decides), and the name of the class."""


def architecture_digest(config: ModelConfig) -> str:
    """Return the digest of the model's config (rotary base, experts per token, windows, norms), 64 hex
    digits. The weights may be equal where it is not.

    With ``model.trust_remote_code`` it covers the model's own code too: a folder's files, or the hub's
    commit. Raises ConfigError if the config cannot be loaded."""
    hf_config = model_config(config)
    parts: dict[str, Any] = {"config": _plain(hf_config.to_dict())}
    if config.trust_remote_code:
        code = sorted(Path(config.path).glob("*.py"))
        parts["code"] = [getattr(hf_config, "_commit_hash", None), files_digest(code)]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def _plain(value: Any) -> Any:
    """Return a config's content without the fields that have no effect, with names that JSON can sort."""
    if isinstance(value, dict):
        return {str(key): _plain(child) for key, child in value.items() if key not in WITHOUT_EFFECT}
    if isinstance(value, (list, tuple)):
        return [_plain(child) for child in value]
    return value
