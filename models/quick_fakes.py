"""Tensors with shapes and no values whose operations cost little Python: what an operation makes of tensors
is worked out once, and looked up for others of the same sizes.

torch's FakeTensorMode has such a table too, but its keys and its results take a tenth of a millisecond each,
and a simulated step is thousands of operations.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

NAMESPACES = ("aten", "fsdp")
"""Namespaces of operations that do nothing but compute."""
OTHERS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view)
"""Tags of operations whose result depends on values, or that change what a tensor looks like."""
OF_THE_PROFILER = frozenset(
    (
        torch.ops.profiler._record_function_enter_new.default,
        torch.ops.profiler._record_function_exit._RecordFunction,
    )
)
"""Operations on no tensor."""
PLAIN = frozenset(
    (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
)
"""Types of arguments that are compared by their values."""
META = torch.device("meta")

Key = tuple[Any, ...]


@dataclass(frozen=True)
class Made:
    """How one of the tensors that an operation returned came about."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    source: int | None
    """Number of the argument that it is, or whose storage it has; None: it has a new storage."""
    itself: bool
    """Whether it is that argument."""
    attributes: Mapping[str, Any] = field(repr=False)
    """Those of a new FakeTensor, but for its mode."""


@dataclass(frozen=True)
class Result:
    """What an operation returned: a tensor, a list or tuple of tensors, or None."""

    kind: type
    made: tuple[Made, ...]


class QuickFakes(FakeTensorMode):
    """A FakeTensorMode that looks up what an operation returned for tensors of the same metadata."""

    known: dict[Key, Result | None] = {}  # noqa: RUF012
    """What operations returned, in any mode of this process; None: they have to be asked every time."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.cache_enabled = False  # torch's own table

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in OF_THE_PROFILER:
            with torch._C._DisableTorchDispatch():
                return func(*args)
        given: list[FakeTensor] = []
        key = self._key(func, args, kwargs or {}, given)
        if key is not None and (found := self.known.get(key)) is not None:
            return self._again(found, given)
        out = super().__torch_dispatch__(func, types, args, kwargs or {})
        if key is not None and key not in self.known:
            changed = self._key(func, args, kwargs or {}, []) != key
            self.known[key] = None if changed else self._remembered(out, given)
        return out

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and keeping the compiler out costs time at every call

    # -- the key -----------------------------------------------------------------------------------

    def _key(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], given: list[FakeTensor]
    ) -> Key | None:
        """Return everything that the result depends on, and add the tensors among the arguments to ``given``;
        None where it may depend on more."""
        if not (isinstance(func, OpOverload) and _only_computes(func)):
            return None
        key: list[Any] = [
            func,
            torch.get_default_dtype(),
            torch._C._get_default_device(),
            torch.is_inference_mode_enabled(),
            *kwargs,
        ]
        known = self._add(key, args, given) and self._add(key, kwargs.values(), given)
        return tuple(key) if known else None

    def _add(self, key: list[Any], values: Iterable[Any], given: list[FakeTensor]) -> bool:
        """Add the arguments to a key; return False where one of them is not known by its metadata."""
        for value in values:
            kind = type(value)
            if kind is FakeTensor:
                if value.constant is not None or value.fake_mode is not self:
                    return False
                given.append(value)
                key += (
                    value.shape,
                    value.stride(),
                    value.storage_offset(),
                    value.dtype,
                    value.fake_device,
                    value.requires_grad,
                    value.untyped_storage().nbytes(),
                    torch._C._dispatch_keys(value).raw_repr(),
                )
            elif kind in PLAIN:
                key += (kind, value)
            elif kind is list or kind is tuple:
                key += (kind, len(value))
                if not self._add(key, value, given):
                    return False
            else:
                return False
        return True

    # -- the result --------------------------------------------------------------------------------

    def _remembered(self, out: Any, given: list[FakeTensor]) -> Result | None:
        """Return how ``out`` came about; None where ``_again`` would not make the same of the arguments."""
        kind, tensors = type(out), _tensors(out)
        if tensors is None:
            return None
        made = [found for tensor in tensors if (found := _made(tensor, given)) is not None]
        if len(made) < len(tensors):
            return None
        new = [t.untyped_storage()._cdata for t, m in zip(tensors, made, strict=True) if m.source is None]
        if len(set(new)) < len(new):
            return None
        result = Result(kind, tuple(made))
        again = _tensors(self._again(result, given)) or []
        return result if all(map(_alike, tensors, again)) else None

    def _again(self, result: Result, given: list[FakeTensor]) -> Any:
        if result.kind is FakeTensor:
            return self._tensor(result.made[0], given)
        if result.made or result.kind in (list, tuple):
            return result.kind(self._tensor(made, given) for made in result.made)
        return None

    def _tensor(self, made: Made, given: list[FakeTensor]) -> FakeTensor:
        if made.itself and made.source is not None:
            return given[made.source]
        with torch._C._DisableTorchDispatch():
            if made.source is None:
                plain = torch.empty_strided(made.shape, made.stride, dtype=made.dtype, device=META)
            else:
                plain = torch.empty(0, dtype=made.dtype, device=META)
                plain.set_(given[made.source].untyped_storage(), made.offset, made.shape, made.stride)
            tensor = Tensor._make_subclass(
                FakeTensor, plain, False, dispatch_device=True, device_for_backend_keys=made.device
            )
        if made.source is None:
            torch._C._set_throw_on_mutable_data_ptr(tensor)  # there is no memory to read
        tensor.__dict__.update(made.attributes, fake_mode=self)
        return tensor


@cache
def _only_computes(func: OpOverload) -> bool:
    """Return whether metadata say everything of what ``func`` returns, as far as its declaration says."""
    lifts = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)
    return func.namespace in NAMESPACES and func not in lifts and not any(tag in func.tags for tag in OTHERS)


def _tensors(out: Any) -> list[Any] | None:
    """Return the tensors that an operation returned; None where it returned something else."""
    found = [] if out is None else list(out) if type(out) in (list, tuple) else [out]
    return found if all(type(tensor) is FakeTensor for tensor in found) else None


def _made(tensor: FakeTensor, given: list[FakeTensor]) -> Made | None:
    """Return how the tensor came about; None where that cannot be told from this one call."""
    itself = [i for i, one in enumerate(given) if one is tensor]
    storage = tensor.untyped_storage()._cdata
    sources = itself or [i for i, one in enumerate(given) if one.untyped_storage()._cdata == storage]
    if tensor.constant is not None or len(sources) > 1 or (tensor.requires_grad and not itself):
        return None
    attributes = (
        {} if itself else {name: value for name, value in vars(tensor).items() if name != "fake_mode"}
    )
    return Made(
        tuple(tensor.shape),
        tensor.stride(),
        int(tensor.storage_offset()),
        tensor.dtype,
        tensor.fake_device,
        sources[0] if sources else None,
        bool(itself),
        attributes,
    )


def _alike(one: FakeTensor, other: FakeTensor) -> bool:
    """Return whether nothing but their identity tells two results apart."""
    same = [
        (
            torch._C._dispatch_keys(tensor).raw_repr(),
            *(tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.untyped_storage().nbytes()),
        )
        for tensor in (one, other)
    ]
    return same[0] == same[1]
