"""Processes, devices, sharding, and the only collectives of the project.

A process group always exists: torchrun or accelerate launch starts it, and without a launcher it has one
rank. So one CPU process, two gloo ranks and eight GPUs run the same code.
"""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from common.errors import UserError
from common.versions import refusal
from common.worker_process import run_workers_on
from config.machine import refuse_left_over
from models.deterministic import compute_as_torch_does, compute_deterministically

TIMEOUT = timedelta(minutes=10)
"""How long a collective between devices may take: a rank that is dead or hangs ends the others after it."""
PATIENCE = timedelta(days=7)
T = TypeVar("T")

_patient: dist.ProcessGroup | None = None
"""Gloo group for waits on the CPU: ranks may wait for hours while one samples or scores a round, or writes a
checkpoint. The death of a rank still ends these waits; a device that hangs is not detected here."""


Group = dist.ProcessGroup


@dataclass(frozen=True)
class World:
    """This process's place among all processes."""

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def start(replicas: int = 1, deterministic: bool = False, lends: bool = False) -> World:
    """Join (or create) the process group and return this process's World. ``replicas`` > 1: the number of
    copies of the sharded model (HSDP), for several nodes. ``deterministic``: as the setting. ``lends``: an
    engine on the same GPU will read this process's tensors where they lie. Raises UserError
    for a launcher's variables without a launcher, for a torch that is not accepted (``common.versions``), and
    for an environment that is not deterministic."""
    refuse_left_over(os.environ)
    if (refused := refusal("torch", torch.__version__)) is not None:
        raise UserError(f"this environment {refused}")
    cuda = torch.cuda.is_available()
    if deterministic:
        compute_deterministically(cuda)
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
        if not lends:
            let_segments_grow()
    global _patient
    if not dist.is_initialized():
        _patient = None
        backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
        if int(os.environ.get("WORLD_SIZE") or 1) > 1:
            dist.init_process_group(backend, timeout=TIMEOUT)
        else:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=TIMEOUT)
    if _patient is None:  # a group has a thread, and lives as long as the process group
        _patient = dist.new_group(backend="gloo", timeout=PATIENCE)
    size = dist.get_world_size()
    if hasattr(os, "sched_getaffinity"):  # Linux
        mine = socket.gethostname(), os.sched_getaffinity(0)
        run_workers_on(set().union(*(cores for host, cores in gather_objects(mine) if host == mine[0])))
    mesh = make_mesh(device.type, size, replicas)
    return World(dist.get_rank(), size, device, mesh)


def let_segments_grow() -> None:
    """Let torch's allocator extend and shrink what it holds of a GPU. By default it holds blocks of the sizes
    that were asked for, which microbatches of other lengths do not fit into. Tensors of such segments cannot
    be lent to another process by CUDA's handles, which vLLM takes weights by. Does nothing where the
    environment configures the allocator."""
    if not any(name in os.environ for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")):
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


def return_freed_blocks(weights: int, least: int = 1 << 20) -> None:
    """Let glibc return freed blocks of ``least`` bytes or more to the system at once. Unasked it keeps those
    of up to 32 MiB in its heap, between those that live: in training on a CPU a seventh to a fifth of the
    peak. Does nothing with another C library, nor for a model of fewer than 64 MiB (``weights``, bytes),
    whose steps would take up to a sixth more time, as the system clears every page that it lends."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and weights >= 1 << 26 and "MALLOC_MMAP_THRESHOLD_" not in os.environ:
        mallopt(-3, least)  # M_MMAP_THRESHOLD of malloc.h


@contextmanager
def simulated_ranks(size: int, replicas: int = 1) -> Iterator[World]:
    """Act as rank 0 of ``size`` ranks of which no other exists; collectives return at once. For a process
    without a process group, and for tensors without values."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # only here: it is torch's own test aid

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield World(0, size, torch.device("cpu"), make_mesh("cpu", size, replicas))
    finally:
        dist.destroy_process_group()


def make_mesh(device: str, size: int, replicas: int) -> DeviceMesh:
    """Return the mesh of the ranks; the model is sharded over all of them, or over those of each replica."""
    if (
        replicas > 1 and size % replicas == 0
    ):  # a number that does not divide the ranks is refused with the other settings
        return init_device_mesh(device, (replicas, size // replicas), mesh_dim_names=("replicate", "shard"))
    return init_device_mesh(device, (size,), mesh_dim_names=("shard",))


def stop() -> None:
    global _patient
    _patient = None
    compute_as_torch_does()
    if dist.is_initialized():
        dist.destroy_process_group()


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


def keep_gathered(blocks: Iterable[nn.Module]) -> None:
    """Keep every block gathered from its forward to its backward from now on, as ``shard`` with
    ``again=False`` does."""
    for block in blocks:
        if isinstance(block, FSDPModule):
            block.set_reshard_after_forward(False, recurse=False)
            block.__dict__[_AGAIN] = False


_AGAIN = "shards_again"
"""Attribute of a block: whether it is sharded again after its forward."""


@contextmanager
def gathered_once(policy: nn.Module) -> Iterator[None]:
    """Gather every block for the first forward within alone, where the forwards of an answer's tokens would
    each copy all weights. It is so on a single rank and on CPUs; GPUs that share a model may have no room for
    all of it, and gather block by block."""
    of_cpu = next(policy.parameters()).device.type == "cpu"
    blocks = [
        module
        for module in policy.modules()
        if isinstance(module, FSDPModule) and module.__dict__.get(_AGAIN)
    ]
    if not of_cpu and dist.get_world_size() > 1:
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
    that stay gathered (``keep_gathered``) every block too; they would be stale after the next optimizer
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
def fill(policy: nn.Module, whole: dict[str, Tensor], device: torch.device, sends: bool) -> None:
    """Fill a sharded policy on the meta device with its part of the weights ``whole``, of any dtype. Buffers,
    which every rank has made for itself, go to ``device``. ``sends``: rank 0 alone has ``whole`` and sends
    it, one tensor at a time."""
    buffers = {name: buffer.to(device) for name, buffer in policy.named_buffers()}
    to_empty(policy, device)
    for name, buffer in policy.named_buffers():
        buffer.copy_(buffers[name])
    for name, tensor in policy.state_dict().items():
        if sends and dist.get_rank() == 0:
            given = whole[name].to(device, tensor.dtype).contiguous()
        else:
            given = whole[name] if not sends else torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        if sends:
            dist.broadcast(given, src=0)
        local_part(tensor).copy_(given[rows_of(tensor)] if isinstance(tensor, DTensor) else given)


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
            own = held[name]
            if not isinstance(own, DTensor) or isinstance(whole, DTensor):
                continue  # not sharded, or of another unit
            if not torch.equal(whole[rows_of(own)], local_part(own).to(whole.dtype)):
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


def sum_over_ranks(tensor: Tensor) -> Tensor:
    """Sum ``tensor`` (on the device) over ranks, in place, and return it."""
    dist.all_reduce(tensor)
    return tensor


def gather_values(values: Tensor, fill: float) -> Tensor:
    """Return the ``values`` [N] (on the device) of all ranks end to end, on every rank; ``fill`` pads a rank
    that has fewer than another."""
    room = values.new_full((max(gather_objects(len(values))),), fill)
    room[: len(values)] = values
    every = [torch.empty_like(room) for _ in range(dist.get_world_size())]
    dist.all_gather(every, room)
    return torch.cat(every)


def gather_objects(value: Any, group: Group | None = None) -> list[Any]:
    """Return the ``value`` of every rank, in rank order, on every rank. For small Python objects only (it
    goes through the CPU). ``group``: that of another thread (``aside``); None: that of the training
    thread. Simulated ranks have the value of this one."""
    out: list[Any] = [value] * dist.get_world_size()
    if dist.get_backend() == "fake":
        return out
    dist.all_gather_object(out, value, group=_patient if group is None else group)
    return out


def patient() -> Group | None:
    """Return the group of the training thread's waits on the CPU, for libraries that take a group; None: that
    of all collectives, where ``start`` has made no other."""
    return _patient


def aside() -> Group | None:
    """Return a group of all ranks for a thread beside the training thread, whose messages must not mix with
    it. Every rank calls it."""
    return dist.new_group(backend="gloo", timeout=PATIENCE)


def from_main(value: Any) -> Any:
    """Return rank 0's ``value`` on every rank."""
    box = [value]
    dist.broadcast_object_list(box, src=0, group=_patient)
    return box[0]


def on_main(work: Callable[[], T]) -> T:
    """Run ``work`` on rank 0 and return its result on every rank; an error that a user can fix (ValueError,
    OSError, UserError) is raised on every rank."""
    value, failure = from_main(_tried(work) if dist.get_rank() == 0 else None)
    if failure is not None:
        raise failure
    return value  # type: ignore[no-any-return]


def on_every_rank(work: Callable[[], T]) -> list[T]:
    """Run ``work``, which uses no collectives, on every rank and return the small results in rank order; an
    error that a user can fix on any of them is raised on every rank."""
    done = gather_objects(_tried(work))
    for _, failure in done:
        if failure is not None:
            raise failure
    return [value for value, _ in done]


def _tried(work: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return work(), None
    except (ValueError, OSError, UserError) as error:
        return None, error


def launchers_store(prefix: str) -> dist.Store:
    """Return the launcher's key-value store, with keys of its own for ``prefix``. Without a launcher rank 0
    holds it."""
    return dist.PrefixStore(prefix, dist.distributed_c10d._get_default_store())


def barrier() -> None:
    """Wait for every rank, on the CPU."""
    dist.all_reduce(torch.zeros(1), group=_patient)


def any_rank_later(flag: bool) -> Callable[[], bool]:
    """Begin to ask what ``any_rank`` asks, while the ranks go on; return the function that waits for it."""
    box = torch.tensor([int(flag)])
    work = dist.all_reduce(box, group=_patient, async_op=True)

    def said() -> bool:
        work.wait()
        return bool(box.item())

    return said


def any_rank(flag: bool) -> bool:
    """Return whether ``flag`` is true on any rank."""
    box = torch.tensor([int(flag)])
    dist.all_reduce(box, group=_patient)
    return bool(box.item())
