"""Sharding of a policy over ranks by FSDP2, and the parts of its tensors that a rank has."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from models.distributed import World, broadcast

T = TypeVar("T")


def shard(
    policy: nn.Module, blocks: Iterable[nn.Module], world: World, dtype: torch.dtype, again: bool = True
) -> None:
    """Shard the policy with FSDP2: each decoder block is a unit, the rest (embedding, norm, head) is the
    root's. Master weights stay as loaded (float32), the computation runs in ``dtype``, gradients are reduced
    in float32. ``again``: shard a block again after its forward, and gather it a second time for its
    backward."""
    precision = MixedPrecisionPolicy(
        param_dtype=None if dtype == torch.float32 else dtype, reduce_dtype=torch.float32
    )
    for block in blocks:
        fully_shard(block, mesh=world.mesh, mp_policy=precision, reshard_after_forward=again)
        block.__dict__[_AGAIN] = again
    fully_shard(policy, mesh=world.mesh, mp_policy=precision)
    register_fsdp_forward_method(policy, "generate")


_AGAIN = "shards_again"
"""Attribute of a block: whether it is sharded again after its forward."""


@contextmanager
def gathered_once(policy: nn.Module, several: bool) -> Iterator[None]:
    """Gather every block for the first forward within alone, where the forwards of an answer's tokens would
    each copy all weights. It is so on a single rank and on CPUs; GPUs that share a model (``several``) may
    have no room for all of it, and gather block by block."""
    of_cpu = next(policy.parameters()).device.type == "cpu"
    blocks = [
        module
        for module in policy.modules()
        if isinstance(module, FSDPModule) and module.__dict__.get(_AGAIN)
    ]
    if several and not of_cpu:
        blocks = []
    for block in blocks:
        block.set_reshard_after_forward(False, recurse=False)
    try:
        yield
    finally:
        for block in blocks:
            block.set_reshard_after_forward(True, recurse=False)
        reshard(policy)


def reduced_once(policy: nn.Module, world: World, slots: Sequence[T]) -> Iterator[T]:
    """Yield the slots of a step, each to be run forward and backward. Gradients are reduced over the ranks of
    a replica in every slot, but over the replicas (the nodes) only in the last. Until then each rank keeps
    its sharded gradients. A single rank has whole gradients in any case: it adds them up where the backward
    leaves them, and FSDP copies the sums once, in the last slot. The sums are the same to the bit."""
    for i, slot in enumerate(slots):
        last = i == len(slots) - 1
        if isinstance(policy, FSDPModule) and world.size == 1:
            policy.set_requires_gradient_sync(last)
        elif isinstance(policy, FSDPModule) and world.mesh.ndim > 1:
            policy.set_requires_all_reduce(last)
        yield slot


def reshard(policy: nn.Module) -> None:
    """Shard everything again after a forward without backward. FSDP2 leaves the root whole, and with blocks
    that stay gathered (``again=False``) every block too; they would be stale after the next optimizer
    step."""
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def to_empty(policy: nn.Module, device: torch.device) -> None:
    """Give a sharded policy on the meta device tensors without values on ``device``. A weight that modules
    share stays one parameter: FSDP2 knows it as one, whose owner is the first of these modules."""
    owners: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in policy.modules():
        for name, parameter in module.named_parameters(recurse=False):
            owners.setdefault(parameter, []).append((module, name))
    policy.to_empty(device=device)
    for (first, name), *others in owners.values():
        for module, its_name in others:
            setattr(module, its_name, getattr(first, name))


@torch.no_grad()
def fill(policy: nn.Module, whole: dict[str, Tensor], world: World, sends: bool) -> None:
    """Fill a sharded policy on the meta device with its part of the weights ``whole``, of any dtype. Buffers,
    which every rank has made for itself, go to the rank's device. ``sends``: rank 0 alone has ``whole`` and
    sends it, one tensor at a time."""
    buffers = {name: buffer.to(world.device) for name, buffer in policy.named_buffers()}
    to_empty(policy, world.device)
    for name, buffer in policy.named_buffers():
        buffer.copy_(buffers[name])
    for name, tensor in policy.state_dict().items():
        if not sends:
            value = whole[name]
        elif world.is_main:
            value = whole[name].to(world.device, tensor.dtype).contiguous()
        else:
            value = torch.empty(tensor.shape, dtype=tensor.dtype, device=world.device)
        if sends:
            broadcast(value)
        local_part(tensor).copy_(value[rows_of(tensor)] if isinstance(tensor, DTensor) else value)


@torch.no_grad()
def unlike_gathered(policy: nn.Module) -> list[str]:
    """Return the names of the weights of which a forward gathers other values than the state dict holds, in
    this rank's part. Every rank calls it, between steps; one unit is gathered at a time."""
    held = dict(policy.named_parameters(remove_duplicate=False))
    names = []
    for prefix, unit in policy.named_modules():
        if not isinstance(unit, FSDPModule):
            continue
        unit.unshard()
        for name, whole in cast(nn.Module, unit).named_parameters(prefix, remove_duplicate=False):
            parameter = held[name]
            if not isinstance(parameter, DTensor) or isinstance(whole, DTensor):
                continue  # not sharded, or of another unit
            if not torch.equal(whole[rows_of(parameter)], local_part(parameter).to(whole.dtype)):
                names.append(name)
        unit.reshard()
    return names


@contextmanager
def rounded(policy: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Round the policy's weights to ``dtype`` and back, as they will be exported, for as long as the context
    lasts."""
    params = [] if dtype == torch.float32 else [p for p in policy.parameters() if p.dtype == torch.float32]
    masters = [p.detach().clone() for p in params]
    with torch.no_grad():
        for p in params:
            p.copy_(p.to(dtype))
    try:
        yield
    finally:
        with torch.no_grad():
            for p, master in zip(params, masters, strict=True):
                p.copy_(master)


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


def local(tensor: Tensor) -> Tensor:
    """Return the whole plain tensor behind a DTensor; a plain tensor is returned unchanged."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def clip_grad_norm(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Scale the gradients so that their norm over the whole model is at most ``max_norm``; return the norm
    before scaling, [] on the device."""
    return local(torch.nn.utils.clip_grad_norm_(parameters, max_norm))
