"""Processes and devices, the only collectives of the project, and work that ranks share.

A process group always exists: torchrun or accelerate launch starts it, and without a launcher it has one
rank. So one CPU process, two gloo ranks and eight GPUs run the same code.
"""

from __future__ import annotations

import ctypes
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial, wraps
from types import FunctionType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from common.errors import Requeue, StoppedError, UserError
from common.progress import by_itself, pause
from common.secrets import scrub_text
from common.versions import refusal
from common.worker_process import run_workers_on
from config.machine import refuse_left_over

TIMEOUT = timedelta(minutes=10)
"""How long a collective between devices may take: a rank that is dead or hangs ends the others after it."""
LONG_TIMEOUT = timedelta(days=7)
STOP_SECONDS = 0.5
"""A rank looks so often whether another was requested to stop."""
_ENDED = "ended"
"""Key, in the launcher's store, of the message of a rank that ended while others waited for it."""
_SENT = "the other ranks are told"
Group = dist.ProcessGroup
T = TypeVar("T")
R = TypeVar("R")
Done = tuple[T | None, BaseException | None]
"""The result of a work, or the exception that it raised."""

ENVIRONMENT: dict[str, Sequence[str]] = {
    "CUBLAS_WORKSPACE_CONFIG": (":4096:8", ":16:8"),
    "NCCL_ALGO": ("Ring", "Tree"),
    "FLASH_ATTENTION_DETERMINISTIC": ("1",),
    "TORCHINDUCTOR_DETERMINISTIC": ("1",),
    "VLLM_BATCH_INVARIANT": ("1",),
}
"""Variable -> the value that ``deterministic=true`` sets on a machine with a GPU, and others that are as
good. They are those of cuBLAS, NCCL (whose sums within a switch vary), flash-attn by transformers,
torch.compile, and vLLM, whose processes inherit them."""
_deterministic = False

_long_timeout: Group | None = None
"""Gloo group for waits on the CPU: ranks may wait for hours while one samples or scores a round, or writes a
checkpoint. The death of a rank still ends these waits; a device that hangs is not detected here."""
_explain: Callable[[Exception], Exception] | None = None
"""What ``explained`` holds."""


@dataclass(frozen=True)
class World:
    """This process's place among all processes."""

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh
    nodes: tuple[int, ...] = ()
    """each rank's node, the nodes counted from 0 by their first ranks; (): all ranks are on one"""

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def node(self) -> int:
        """This rank's node: a machine, or what one torchrun of several on it started."""
        return self.nodes[self.rank] if self.nodes else 0

    @property
    def leaders(self) -> list[int]:
        """Each node's first rank (the launcher's LOCAL_RANK 0), which does what is done once a node."""
        return [self.nodes.index(node) for node in range(max(self.nodes) + 1)] if self.nodes else [0]

    @property
    def ranks_of_node(self) -> list[int]:
        """The ranks of this rank's node."""
        nodes = self.nodes or (0,) * self.size
        return [rank for rank, node in enumerate(nodes) if node == self.node]

    @property
    def is_leader(self) -> bool:
        return self.rank in self.leaders


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
    global _long_timeout
    if not dist.is_initialized():
        _long_timeout = None
        backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
        if int(os.environ.get("WORLD_SIZE") or 1) > 1:
            dist.init_process_group(backend, timeout=TIMEOUT)
        else:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=TIMEOUT)
    if _long_timeout is None:  # a group has a thread, and lives as long as the process group
        _long_timeout = dist.new_group(backend="gloo", timeout=LONG_TIMEOUT)
    size, place = dist.get_world_size(), (socket.gethostname(), os.environ.get("GROUP_RANK", ""))
    if hasattr(os, "sched_getaffinity"):  # Linux
        mine = place[0], os.sched_getaffinity(0)
        run_workers_on(set().union(*(cores for host, cores in gather_objects(mine) if host == mine[0])))
    places = gather_objects(place)
    order = list(dict.fromkeys(places))
    mesh = make_mesh(device.type, size, replicas)
    return World(dist.get_rank(), size, device, mesh, tuple(map(order.index, places)))


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


def make_mesh(device: str, size: int, replicas: int) -> DeviceMesh:
    """Return the mesh of the ranks; the model is sharded over all of them, or over those of each replica."""
    # A number that does not divide the ranks is refused with the other settings.
    if replicas > 1 and size % replicas == 0:
        return init_device_mesh(device, (replicas, size // replicas), mesh_dim_names=("replicate", "shard"))
    return init_device_mesh(device, (size,), mesh_dim_names=("shard",))


@contextmanager
def started(**settings: Any) -> Iterator[World]:
    """Hold the process group of ``start(**settings)`` within, and end as ``others_end`` does."""
    world = start(**settings)
    try:
        with others_end():
            yield world
    finally:
        stop()


def stop() -> None:
    global _long_timeout
    _long_timeout = None
    compute_as_torch_does()
    if dist.is_initialized():
        dist.destroy_process_group()


def compute_deterministically(gpu: bool) -> None:
    """Let torch choose operations whose bits do not vary from run to run, in the whole process, and refuse
    others when they are called. Called before anything is on the device. Raises UserError for a variable of
    the environment that says otherwise."""
    for name, values in ENVIRONMENT.items() if gpu else ():
        if os.environ.setdefault(name, values[0]) not in values:
            wanted = " or ".join(values)
            raise UserError(f"deterministic=true needs {name}={wanted}, not {os.environ[name]}: unset it")
    global _deterministic
    _deterministic = True
    torch.use_deterministic_algorithms(True)
    filling(False)  # nothing here reads such memory


def filling(on: bool) -> None:
    """Let torch write NaN into memory that it has just allocated, as its flag asks for by itself."""
    torch.utils.deterministic.fill_uninitialized_memory = on  # type: ignore[attr-defined]


def compute_as_torch_does() -> None:
    """Undo ``compute_deterministically``, if it was called, but for the environment."""
    global _deterministic
    if _deterministic:
        _deterministic = False
        filling(True)
        torch.use_deterministic_algorithms(False)


# -- collectives -----------------------------------------------------------------------------------


def is_main() -> bool:
    """Return whether this is rank 0, or a process that has joined no others."""
    return not dist.is_initialized() or dist.get_rank() == 0


def sum_over_ranks(tensor: Tensor) -> Tensor:
    """Sum ``tensor`` (on the device) over ranks, in place, and return it."""
    dist.all_reduce(tensor)
    return tensor


def broadcast(tensor: Tensor) -> None:
    """Set ``tensor`` (on the device) to rank 0's, in place."""
    dist.broadcast(tensor, src=0)


def gather_objects(value: Any, group: Group | None = None) -> list[Any]:
    """Return the ``value`` of every rank, in rank order, on every rank. For small Python objects only (it
    goes through the CPU). ``group``: that of another thread (``side_group``); None: that of the training
    thread."""
    out: list[Any] = [value] * dist.get_world_size()
    dist.all_gather_object(out, value, group=_long_timeout if group is None else group)
    return out


def to_main(value: Any, ranks: Sequence[int]) -> list[Any]:
    """Return on rank 0 the ``value`` of each of ``ranks``, in their order; [] on the others. It goes from one
    rank to the other through the CPU, and no third one gets it. Every rank calls it."""
    this = dist.get_rank()
    if this != 0 and this in ranks:
        dist.send_object_list([value], dst=0, group=_long_timeout)
    values = []
    for rank in ranks if this == 0 else ():
        box = [value]
        if rank != 0:
            dist.recv_object_list(box, src=rank, group=_long_timeout)
        values += box
    return values


def from_main(value: Any) -> Any:
    """Return rank 0's ``value`` on every rank."""
    box = [value]
    dist.broadcast_object_list(box, src=0, group=_long_timeout)
    return box[0]


def barrier() -> None:
    """Wait for every rank, on the CPU."""
    dist.all_reduce(torch.zeros(1), group=_long_timeout)


def any_rank(flag: bool) -> bool:
    """Return whether ``flag`` is true on any rank."""
    return any_rank_later(flag)()


def any_rank_later(flag: bool) -> Callable[[], bool]:
    """Begin what ``any_rank`` does, while the ranks go on; return the function that waits for it."""
    box = torch.tensor([int(flag)])
    work = dist.all_reduce(box, group=_long_timeout, async_op=True)

    def wait() -> bool:
        work.wait()
        return bool(box.item())

    return wait


def long_timeout_group() -> Group | None:
    """Return the group of the training thread's waits on the CPU, for libraries that take a group; None: that
    of all collectives, where ``start`` has made no other."""
    return _long_timeout


def side_group() -> Group | None:
    """Return a group of all ranks for a thread beside the training thread, whose messages must not mix with
    it. Every rank calls it."""
    return dist.new_group(backend="gloo", timeout=LONG_TIMEOUT)


def launchers_store(prefix: str) -> dist.Store:
    """Return the launcher's key-value store, with keys of its own for ``prefix``. Without a launcher rank 0
    holds it."""
    return dist.PrefixStore(prefix, dist.distributed_c10d._get_default_store())


# -- shared work -----------------------------------------------------------------------------------


class ShareError(StoppedError):
    """A rank could not do its share; the message says which rank and why."""


def on_main(work: Callable[[], T], duties: Sequence[Callable[[Any], Any]] = ()) -> T:
    """Run ``work``, plain code without collectives, on rank 0; return its result, or raise its exception, on
    every rank. ``duties``: what rank 0 may request of the others meanwhile (``Ranks``)."""
    if dist.get_rank() != 0:
        return _unwrap(_help(duties))
    with by_itself():
        done = _caught(work)
    if dist.get_world_size() > 1:
        _refuse_if_one_has_ended()
        from_main((None, done))
    return _unwrap(done)


def on_main_alone(cls: type[T]) -> type[T]:
    """Class decorator: each public method runs on rank 0 alone, and every rank calls it alike (``on_main``).
    Other methods run where they are called."""

    def public(method: Callable[..., Any]) -> Callable[..., Any]:
        return wraps(method)(lambda *args: on_main(lambda: method(*args)))

    for name, method in list(vars(cls).items()):
        if isinstance(method, FunctionType) and not name.startswith("_"):
            setattr(cls, name, public(method))
    return cls


def on_every_rank(work: Callable[[], T]) -> list[T]:
    """Run ``work``, which uses no collectives, on every rank and return the small results in rank order, or
    raise the first rank's exception on every rank."""
    return [_unwrap(done) for done in gather_objects(_caught(work))]


@contextmanager
def ended_together(alike: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """End all ranks with one message if the work within, which uses collectives, fails on this one, while the
    others wait for it. The process of this rank must end then, which ends their waiting; they and rank 0
    raise ShareError with its message. ``alike``: what every rank raises at once, if one does."""
    try:
        yield
    except Exception as error:
        if dist.get_world_size() == 1 or isinstance(error, alike) or _SENT in getattr(error, "__notes__", ()):
            raise
        _refuse_if_one_has_ended()
        if _of_another(error):
            raise
        message = f"rank {dist.get_rank()} failed: {_named(error)}"
        with suppress(RuntimeError):  # rank 0 is gone, and its store
            launchers_store("ranks").set(_ENDED, message)
        if dist.get_rank() == 0 and not alike:
            raise ShareError(message) from error
        print(f"error: {scrub_text(message)}", file=sys.stderr, flush=True)
        error.add_note(_SENT)
        raise


@contextmanager
def explained(explain: Callable[[Exception], Exception]) -> Iterator[None]:
    """Raise, in place of an error within, what ``explain`` returns for it: the error itself, or one whose
    message has a remedy. Other ranks are sent that one, too."""
    global _explain
    _explain = explain
    try:
        yield
    except Exception as error:
        if _SENT in getattr(error, "__notes__", ()) or (better := explain(error)) is error:
            raise
        raise better from error
    finally:
        _explain = None


class Ranks:
    """The ranks of a run where rank 0 does the work that is done once a round, and the others wait and help
    on request: to sample, to gather weights and to score.

    Every rank declares alike and beforehand, when samplers and rewards are built, what rank 0 may request."""

    def __init__(self) -> None:
        self._duties: list[Callable[[Any], Any]] = []
        self._listening = False

    def on_main(self, work: Callable[[], T]) -> T:
        """Do as the function ``on_main``; ``work`` may call the functions that ``collective`` and
        ``map_over_ranks`` returned. Every rank calls this."""
        self._listening = True
        try:
            return on_main(work, self._duties)
        finally:
            self._listening = False

    def collective(self, work: Callable[[T], R]) -> Callable[[T], R]:
        """Return a function that runs ``work`` on every rank when rank 0 calls it inside ``on_main``;
        ``work`` may use collectives. What it raises on any rank ends all (``ended_together``). Every rank
        calls this alike, and in the same order."""
        duty = len(self._duties)
        self._duties.append(work)

        def request(value: T) -> R:
            if dist.get_world_size() > 1:
                assert self._listening, "the other ranks do not listen outside of on_main"
                from_main((duty, value))
            with ended_together(), by_itself(False):
                return work(value)

        return request

    def map_over_ranks(self, work: Callable[[T], R]) -> Callable[[Sequence[T]], list[R]]:
        """Return a function that applies ``work`` to many items, a share of them on every rank, and returns
        the results in the items' order. ``work`` uses no collectives. Every rank calls this alike, as
        ``collective``.

        With several ranks, what ``work`` raises on any of them is raised once all are done: a UserError as it
        is, anything else as a ShareError.
        """
        rank, size = dist.get_rank(), dist.get_world_size()
        if size == 1:
            return map_locally(work)

        def share(items: Sequence[T]) -> list[Done[list[R]]]:
            with by_itself():
                return gather_objects(_sendable(_caught(partial(_each, work, items[rank::size]))))

        of_every_rank = self.collective(share)

        def each(items: Sequence[T]) -> list[R]:
            parts = [_unwrap(done) for done in of_every_rank(items)]
            return [parts[i % size][i // size] for i in range(len(items))]

        return each

    def on_leaders(
        self, work: Callable[[T], R], world: World
    ) -> Callable[[Mapping[int, T]], dict[int, Done[R]]]:
        """Return a function that takes a value for some nodes, whose leaders call ``work`` with it at once,
        and returns what each of them returned or raised (a UserError as it is, anything else as a
        ShareError). Results reach rank 0 alone. ``work`` uses no collectives. Every rank calls this alike, as
        ``collective``."""

        def serve(values: Mapping[int, T]) -> dict[int, Done[R]]:
            done: Done[R] = None, None
            if world.is_leader and world.node in values:
                with by_itself():
                    done = _sendable(_caught(partial(work, values[world.node])))
            errors = gather_objects(done[1])
            leaders = {node: world.leaders[node] for node in sorted(values)}
            succeeded = [rank for rank in leaders.values() if errors[rank] is None]
            results = dict(zip(succeeded, to_main(done[0], succeeded), strict=world.is_main))
            return {node: (results.get(rank), errors[rank]) for node, rank in leaders.items()}

        return self.collective(serve)


def map_locally(work: Callable[[T], R]) -> Callable[[Sequence[T]], list[R]]:
    """Return the function that ``Ranks.map_over_ranks`` returns, for this process alone."""
    return partial(_each, work)


def _each(work: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """Return the result of ``work`` for each item. Raises Requeue where the run is requested to stop
    meanwhile."""
    done = []
    for item in items:
        pause()
        done.append(work(item))
    return done


def _help(duties: Sequence[Callable[[Any], Any]]) -> Done[Any]:
    """Do what rank 0 requests until its work is done; return the outcome of that work."""
    while True:
        duty, value = from_main(None)
        if duty is None:
            return value
        # Where it stops, as all ranks then do, rank 0's outcome says so.
        with ended_together(), suppress(Requeue):
            duties[duty](value)


@contextmanager
def others_end() -> Iterator[None]:
    """If a collective within fails because another rank's process has ended, raise Requeue where that was
    requested to stop, else StoppedError with the reason that it left, or that it left none."""
    try:
        yield
    except RuntimeError as error:
        if not _of_another(error):
            raise
        _refuse_if_one_has_ended()
        if StopRequest().heard():
            print("another rank was requested to stop and has ended", file=sys.stderr, flush=True)
            raise Requeue from None
        raise ShareError(
            "the process of another rank has ended without a message: look for what killed it (memory, a "
            "limit of time, a machine); the same command begins again, and with resume=true a run goes on"
        ) from error


def _of_another(error: Exception) -> bool:
    """Return whether a collective failed because the process of another rank has ended."""
    return "gloo" in str(error)


def _refuse_if_one_has_ended() -> None:
    """Raise ShareError with the message of a rank that has ended, if there is one."""
    try:
        store = launchers_store("ranks")
        message = store.get(_ENDED).decode() if store.check([_ENDED]) else None
    except RuntimeError:  # the store has ended with rank 0
        return
    if message is not None:
        raise ShareError(message)


def _caught(work: Callable[[], T]) -> Done[T]:
    """Return what ``work`` returns or raises. An exception goes to the ranks that wait, which would wait for
    ever if this rank left."""
    try:
        return work(), None
    except BaseException as error:
        return None, error


def _sendable(done: Done[T]) -> Done[T]:
    """Return ``done``, with an exception that other ranks can be sent: not each of a library's can be."""
    error = done[1]
    if not isinstance(error, Exception) or isinstance(error, UserError):
        return done
    traceback.print_exception(error)
    words = " ".join(_named(error).split())
    return None, ShareError(f"rank {dist.get_rank()} could not do its share: {words}")


def _named(error: Exception) -> str:
    """Return the kind and message of ``error``, or of what stands for it (``explained``)."""
    better = error if _explain is None else _explain(error)
    return f"{type(better).__name__}: {better}"


def _unwrap(done: Done[T]) -> T:
    """Return the result in ``done``, or raise its exception."""
    value, error = done
    if error is not None:
        raise error
    return value  # type: ignore[return-value]


class StopRequest:
    """Whether one of several ranks was requested to stop, and the microbatch at which all stop. Nothing here
    waits for a device."""

    def __init__(self) -> None:
        self._store = launchers_store("stop")
        self._looked, self._number = 0.0, 0
        self._before: Callable[[], bool] = bool

    def tell(self, number: int) -> None:
        """Tell the other ranks that this one got the signal ``number``. Any thread may call it."""
        with suppress(RuntimeError):  # rank 0 is gone, and its store
            self._store.set("signal", str(number))

    def heard(self) -> int:
        """Return the number of a signal that a rank got, or 0; the ranks learn it one after another."""
        if not self._number and time.monotonic() - self._looked > STOP_SECONDS:
            self._looked = time.monotonic()
            with suppress(RuntimeError):
                self._number = int(self._store.get("signal")) if self._store.check(["signal"]) else 0
        return self._number

    def agreed(self, requested: bool, now: bool = False) -> bool:
        """Return on every rank whether one of them had ``requested`` at the call before; ``now``: at this
        one, for which the ranks wait. Every rank calls it alike, and the flags travel until the next call."""
        if now:
            return any_rank(requested)
        before, self._before = self._before, any_rank_later(requested)
        return before()
