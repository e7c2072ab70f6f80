"""Memory that tensors take, tracked storage by storage while a computation runs. For every named moment the
tracker records the peak and the parts that make it up. It also sees tensors without values, whose storages
have a size and no memory."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_leaves

from models.sharding import local_part
from models.simulated import simulates_gpu

Moment = tuple[str, int | None]
"""(name of what is being done, number of the block that does it, counted from the last block where it is
below 0)."""

MADE_IN = {
    "models/logprobs.py": "head",
    "_fsdp_param.py": "gathered blocks",
    "_fsdp_collectives.py": "communication",
}
"""End of a source file's name -> the part that its new tensors belong to."""
FRAMES = 10  # callers that are searched for such a file
NEVER_THERE = "_sharding_prop.py"
"""File in which DTensor infers shapes from tensors as large as those of all ranks together, which no real
step makes."""

ENGINE = "torch/autograd/graph.py"  # autograd's engine is called there
WORKSPACE = "attention's workspace"
DEVICE_OF = torch.ops.prim.device.default
SUM = torch.ops.aten.add.Tensor
wraps = functools.cache(is_traceable_wrapper_subclass_type)
"""Whether tensors of a class wrap others."""


class StorageTracker(TorchDispatchMode):
    """Follows every storage from the operation that makes it to its end.

    ``moment``: what is being done now, set as the computation goes on. A new tensor belongs to the part that
    ``MADE_IN`` names for the code that made it, else to ``making``; ``assign`` changes the part of existing
    tensors.
    """

    def __init__(self) -> None:
        super().__init__()
        self.moment: Moment = ("start", None)
        self.making = "work"
        self.peaks: dict[Moment, dict[str, int]] = {}
        """Moment -> bytes by part when their total was largest."""
        self._live: dict[int, tuple[int, str]] = {}
        self._parts: dict[str, int] = {}
        self._now = 0
        self._most: dict[Moment, int] = {}

    # -- current contents --------------------------------------------------------------------------

    def assign(self, part: str, tensors: Iterable[Tensor]) -> None:
        """Assign these tensors, and everything in their storages, to ``part`` from now on."""
        for tensor in tensors:
            storage = local_part(tensor).untyped_storage()
            size, before = self._follow(storage)
            if before != part:
                self._parts[before] -= size
                self._parts[part] = self._parts.get(part, 0) + size
                self._live[storage._cdata] = (size, part)

    @property
    def now(self) -> dict[str, int]:
        """Current bytes by part."""
        return {part: size for part, size in self._parts.items() if size}

    def enter(self, moment: Moment) -> None:
        """Set the current moment to ``moment``."""
        self.moment = moment
        self._note()

    # -- tracking ----------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is DEVICE_OF and isinstance(args[0], FakeTensor):
            return args[0].device  # more than half of all calls, answered by the tensor itself
        for kind in types:
            if wraps(kind):
                return NotImplemented  # a DTensor's local part, like any wrapped tensor, is seen by itself
        if func is SUM and adds_in_place(*args):  # the engine does so, but not with tensors of a subclass
            func = torch.ops.aten.add_.Tensor
        work = 0
        if goes_back_through_attention(func) and simulates_gpu():
            work = attention_workspace(*args[1:3])
        self._count(WORKSPACE, work)
        result = func(*args, **(kwargs or {}))
        tensors = (result,) if isinstance(result, Tensor) else tree_leaves(result)
        made = [tensor.untyped_storage() for tensor in tensors if isinstance(tensor, Tensor)]
        new = [storage for storage in made if storage._cdata not in self._live]
        if new and not any(name.endswith(NEVER_THERE) for name in callers(sys._getframe(1))):
            for storage in new:
                self._follow(storage)
        self._count(WORKSPACE, -work)
        return result

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and keeping the compiler out costs time at every call

    def __enter__(self) -> StorageTracker:
        self._resize = torch.UntypedStorage.resize_
        torch.UntypedStorage.resize_ = _telling(self._resize, self._resized)  # type: ignore[method-assign]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]

    def _follow(self, storage: torch.UntypedStorage) -> tuple[int, str]:
        key = storage._cdata
        if key not in self._live:
            makers = filter(None, map(part_of, callers(sys._getframe(1))))
            size, part = storage.nbytes(), next(makers, self.making)
            self._live[key] = (size, part)
            self._count(part, size)
            weakref.finalize(storage, self._gone, key)
        return self._live[key]

    def _gone(self, key: int) -> None:
        size, part = self._live.pop(key)
        self._count(part, -size)

    def _resized(self, storage: torch.UntypedStorage) -> None:
        if (key := storage._cdata) in self._live:
            before, part = self._live[key]
            self._live[key] = (size := storage.nbytes(), part)
            self._count(part, size - before)

    def _count(self, part: str, size: int) -> None:
        self._parts[part] = self._parts.get(part, 0) + size
        self._now += size
        if size > 0:
            self._note()

    def _note(self) -> None:
        if self._now > self._most.get(self.moment, -1):
            self._most[self.moment] = self._now
            self.peaks[self.moment] = self.now


def adds_in_place(a: Tensor, b: Any) -> bool:
    """Return whether autograd's engine adds up two gradients of one tensor, for which it takes no memory."""
    alike = isinstance(b, Tensor) and a.shape == b.shape and a.dtype == b.dtype
    return alike and sys._getframe(2).f_code.co_filename.endswith(ENGINE)


@functools.cache
def goes_back_through_attention(func: Any) -> bool:
    return "backward" in func.__name__ and ("attn" in func.__name__ or "attention" in func.__name__)


def attention_workspace(query: Tensor, key: Tensor) -> int:
    """Return the bytes that FlashAttention-2 takes on a GPU for a backward (flash_api.cpp, mha_varlen_bwd):
    the queries' gradient and a number for each query in float32, and where several heads of queries share one
    of keys, gradients of keys and values for each. FlashAttention-3 takes less."""
    groups, size = query.shape[1] // key.shape[1], query.shape[-1]
    apart = 2 * groups * key.numel() * key.element_size() if groups > 1 else 0
    return 4 * query.numel() // size * (size + 1) + apart


def _telling(resize: Callable[..., Any], tell: Callable[[torch.UntypedStorage], None]) -> Callable[..., Any]:
    """Return ``resize`` followed by a call of ``tell``. FSDP frees and takes memory by resizing, which is not
    a dispatched operation."""

    def resized(storage: torch.UntypedStorage, size: int) -> Any:
        done = resize(storage, size)
        tell(storage)
        return done

    return resized


@functools.cache
def part_of(name: str) -> str | None:
    """Return the part that tensors made in the file ``name`` belong to; None where it is not known."""
    return next((part for end, part in MADE_IN.items() if name.endswith(end)), None)


def callers(frame: FrameType | None) -> Iterator[str]:
    """Yield the files of ``frame`` and of its callers, ``FRAMES`` at most."""
    for _ in range(FRAMES):
        if frame is None:
            return
        yield frame.f_code.co_filename
        frame = frame.f_back
