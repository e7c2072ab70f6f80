"""Processes, devices, sharding, and the only collectives of the project.

A process group always exists: from torchrun or accelerate launch, or of one rank where there was no launcher. So one CPU process, two
gloo ranks and eight GPUs run the same code.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from common.errors import UserError

TIMEOUT = timedelta(minutes=30)
PATIENCE = timedelta(days=7)
T = TypeVar("T")

_patient: dist.ProcessGroup | None = None
"""A gloo group for waits on the CPU: ranks may wait for hours while one samples or scores a round, or writes a checkpoint. A rank that
dies ends them all the same; a device that hangs does not pass through here."""


@dataclass(frozen=True)
class World:
    """This process among the others."""

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def start(replicas: int = 1) -> World:
    """Join (or make) the process group. ``replicas`` > 1: that many copies of the sharded model (HSDP), for several nodes."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
        if "RANK" in os.environ and "MASTER_ADDR" in os.environ:
            dist.init_process_group(backend, timeout=TIMEOUT)
        else:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=TIMEOUT)
    global _patient
    _patient = dist.new_group(backend="gloo", timeout=PATIENCE)
    size = dist.get_world_size()
    if (
        replicas > 1 and size % replicas == 0
    ):  # a number that does not divide the ranks is refused with the other settings
        mesh = init_device_mesh(
            device.type, (replicas, size // replicas), mesh_dim_names=("replicate", "shard")
        )
    else:
        mesh = init_device_mesh(device.type, (size,), mesh_dim_names=("shard",))
    return World(dist.get_rank(), size, device, mesh)


def stop() -> None:
    global _patient
    _patient = None
    if dist.is_initialized():
        dist.destroy_process_group()


def shard(policy: nn.Module, blocks: Iterable[nn.Module], world: World, dtype: torch.dtype) -> None:
    """FSDP2: each decoder block a unit, the rest (embedding, norm, head) the root's. Master weights stay as loaded (float32), the
    computation runs in ``dtype``, gradients are reduced in float32."""
    precision = MixedPrecisionPolicy(
        param_dtype=None if dtype == torch.float32 else dtype, reduce_dtype=torch.float32
    )
    for block in blocks:
        fully_shard(block, mesh=world.mesh, mp_policy=precision)
    fully_shard(policy, mesh=world.mesh, mp_policy=precision)
    register_fsdp_forward_method(policy, "generate")


def reshard(policy: nn.Module) -> None:
    """Shard the root again after a forward without backward: FSDP2 leaves it whole, and stale after the next optimizer step."""
    if isinstance(policy, FSDPModule):
        policy.reshard()


def fill(policy: nn.Module, whole: dict[str, Any], device: torch.device, tie: Callable[[], object]) -> None:
    """Give a sharded policy without weights (on the meta device) those of ``whole``, which rank 0 alone has, one tensor at a time: no
    other rank ever holds more than its share. Buffers, which every rank has made for itself, go to ``device``.
    ``tie`` ties the weights again that leaving the meta device has parted."""
    buffers = {name: buffer.to(device) for name, buffer in policy.named_buffers()}
    policy.to_empty(device=device)
    for name, buffer in policy.named_buffers():
        buffer.copy_(buffers[name])
    tie()
    set_model_state_dict(
        policy, whole, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    )


@contextmanager
def rounded(policy: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """The policy with its weights as they will be exported: rounded to ``dtype`` and back, for as long as the context lasts."""
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


def local(tensor: Tensor) -> Tensor:
    """The plain tensor behind a DTensor, made whole; a plain tensor as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def clip_grad_norm(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Scale the gradients so that the norm of the whole model's is at most ``max_norm``; returns the norm before, [] on the device."""
    return local(torch.nn.utils.clip_grad_norm_(parameters, max_norm))


def sum_over_ranks(tensor: Tensor) -> Tensor:
    """``tensor`` (on the device) summed over ranks, in place."""
    dist.all_reduce(tensor)
    return tensor


def gather_objects(value: Any) -> list[Any]:
    """``value`` of every rank, in rank order, on every rank. Small Python objects only (goes through the CPU)."""
    out: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(out, value, group=_patient)
    return out


def from_main(value: Any) -> Any:
    """Rank 0's ``value`` on every rank."""
    box = [value]
    dist.broadcast_object_list(box, src=0, group=_patient)
    return box[0]


def on_main(work: Callable[[], T]) -> T:
    """What rank 0's ``work`` gives, on every rank; what a user can mend of it, raised on every rank."""
    outcome: tuple[T | None, Exception | None] = (None, None)
    if dist.get_rank() == 0:
        try:
            outcome = (work(), None)
        except (ValueError, OSError, UserError) as error:
            outcome = (None, error)
    value, failure = from_main(outcome)
    if failure is not None:
        raise failure
    return value


class Watchdog:
    """Says which ranks the others wait for. Every rank marks what it is about to do; rank 0 reads the marks in a thread of its own and
    prints them when no rank has marked anything new for ``seconds``."""

    def __init__(self, world: World, seconds: float) -> None:
        self.world, self.seconds = world, seconds
        self._store = dist.PrefixStore("watchdog", dist.distributed_c10d._get_default_store())
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        if world.is_main and world.size > 1:
            self._thread.start()

    def mark(self, doing: str) -> None:
        """What this rank does from now on: a step's number and a word."""
        if self.world.size > 1:
            self._store.set(str(self.world.rank), doing)

    def close(self) -> None:
        self._stop.set()

    def _watch(self) -> None:
        last, since = [""], time.monotonic()
        while not self._stop.wait(min(self.seconds / 4, 10.0)):
            try:
                names = [str(rank) for rank in range(self.world.size)]
                marks = [
                    self._store.get(n).decode() if self._store.check([n]) else "has not begun" for n in names
                ]
            except RuntimeError:  # the store went with the ranks
                return
            if marks != last:
                last, since = marks, time.monotonic()
            elif time.monotonic() - since > self.seconds:
                print(slow_ranks(marks, self.seconds), flush=True)
                since = time.monotonic()


def slow_ranks(marks: list[str], seconds: float) -> str:
    """The message about ``marks``, one a rank: whoever is not at what most are at is who they wait for."""
    usual = max(set(marks), key=marks.count)
    others = [f"rank {rank}: {mark}" for rank, mark in enumerate(marks) if mark != usual]
    return f"no rank has moved for {seconds:g} s; " + (
        f"most are at: {usual}; waited for: {'; '.join(others)}"
        if others
        else f"all are at: {usual} (a collective hangs, or a device does)"
    )


def barrier() -> None:
    """Wait for every rank, on the CPU."""
    dist.all_reduce(torch.zeros(1), group=_patient)


def any_rank(flag: bool) -> bool:
    """Whether ``flag`` is true on any rank."""
    box = torch.tensor([int(flag)])
    dist.all_reduce(box, group=_patient)
    return bool(box.item())
