"""Tensors with shapes and no values that cost little: what an operation makes of tensors of the same metadata
is worked out once.

torch's FakeTensorMode looks for the result of an operation in a table too, but making its key and the result
takes a tenth of a millisecond of Python. A simulated step is thousands of operations.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

NAMESPACES = frozenset(("aten", "fsdp"))
"""Namespaces of operations that do nothing but compute."""
UNKNOWN = (
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.inplace_view,
)
"""Tags of operations whose result, or what they do to their arguments, metadata alone do not say."""
PLAIN = frozenset(
    (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
)
META = torch.device("meta")

Key = tuple[Any, ...]


@dataclass(frozen=True)
class Made:
    """How a tensor that an operation returned came about."""

    given: int | None
    """Number of the tensor among the arguments that it is, or whose storage it has; None: a new storage."""
    same: bool
    """Whether it is that argument itself."""
    shape: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    offset: int = 0
    dtype: torch.dtype = torch.float32
    device: torch.device = META
    state: Mapping[str, Any] | None = None
    """Attributes of a new FakeTensor."""


@dataclass(frozen=True)
class Result:
    """What an operation returned: a tensor, several in a list or tuple, or None."""

    kind: type
    made: tuple[Made, ...]


class QuickFakes(FakeTensorMode):
    """A FakeTensorMode that remembers what operations return."""

    known: dict[Key, Result | None] = {}  # noqa: RUF012
    """Of all modes; None: to be asked anew every time."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given: list[FakeTensor] = []
        key = self._key(func, args, kwargs or {}, given)
        if key is None:
            return super().__torch_dispatch__(func, types, args, kwargs or {})
        if (found := self.known.get(key)) is not None:
            return self._again(found, given)
        out = super().__torch_dispatch__(func, types, args, kwargs or {})
        if key not in self.known:
            after: list[FakeTensor] = []
            unchanged = self._key(func, args, kwargs or {}, after) == key
            self.known[key] = self._remembered(out, given) if unchanged else None
        return out

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and keeping the compiler out costs time at every call

    # -- the key -----------------------------------------------------------------------------------

    def _key(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], given: list[FakeTensor]
    ) -> Key | None:
        """Return what the result depends on, with the tensors among the arguments added to ``given``; None
        where it depends on more."""
        if not (isinstance(func, OpOverload) and _depends_on_metadata(func)):
            return None
        key: list[Any] = [
            func,
            torch.get_default_dtype(),
            torch._C._get_default_device(),
            torch.is_inference_mode_enabled(),
        ]
        if not self._add(key, args, given):
            return None
        if kwargs:
            key.extend(kwargs)
            if not self._add(key, kwargs.values(), given):
                return None
        return tuple(key)

    def _add(self, key: list[Any], values: Any, given: list[FakeTensor]) -> bool:
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
                    value._fake_device,
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
        several = isinstance(out, list | tuple)
        tensors = list(out) if several else [] if out is None else [out]
        kind = type(out) if several or out is None else Tensor
        if kind not in (list, tuple, Tensor, type(None)):
            return None  # a named tuple
        made = [self._made(tensor, given) for tensor in tensors]
        new = [t.untyped_storage()._cdata for t, m in zip(tensors, made, strict=True) if m and m.given is None]
        if None in made or len(set(new)) < len(new):
            return None
        result = Result(kind, tuple(m for m in made if m is not None))
        again = self._again(result, given)
        both = zip(tensors, (again if several else [] if out is None else [again]), strict=True)
        return result if all(_alike(a, b) for a, b in both) else None

    def _made(self, tensor: Any, given: list[FakeTensor]) -> Made | None:
        if type(tensor) is not FakeTensor or tensor.constant is not None:
            return None
        if same := [i for i, one in enumerate(given) if one is tensor]:
            return Made(same[0], same=True) if len(same) == 1 else None
        if tensor.requires_grad or tensor.layout != torch.strided:
            return None
        storage = tensor.untyped_storage()._cdata
        shared = [i for i, one in enumerate(given) if one.untyped_storage()._cdata == storage]
        if len(shared) > 1:
            return None
        state = {name: value for name, value in vars(tensor).items() if name != "fake_mode"}
        return Made(
            shared[0] if shared else None,
            False,
            tuple(tensor.shape),
            tensor.stride(),
            tensor.storage_offset(),
            tensor.dtype,
            tensor.fake_device,
            state,
        )

    def _again(self, result: Result, given: list[FakeTensor]) -> Any:
        if result.kind is Tensor:
            return self._tensor(result.made[0], given)
        if result.kind is type(None):
            return None
        return result.kind(self._tensor(made, given) for made in result.made)

    def _tensor(self, made: Made, given: list[FakeTensor]) -> FakeTensor:
        if made.same:
            assert made.given is not None
            return given[made.given]
        with torch._C._DisableTorchDispatch():
            if made.given is None:
                elem = torch.empty_strided(made.shape, made.stride, dtype=made.dtype, device=META)
            else:
                elem = torch.empty(0, dtype=made.dtype, device=META)
                elem.set_(given[made.given].untyped_storage(), made.offset, made.shape, made.stride)
            fake = Tensor._make_subclass(
                FakeTensor, elem, False, dispatch_device=True, device_for_backend_keys=made.device
            )
        if made.given is None:
            torch._C._set_throw_on_mutable_data_ptr(fake)
        state = fake.__dict__
        state.update(made.state)
        state["fake_mode"] = self
        return fake


_depends: dict[OpOverload, bool] = {}


def _depends_on_metadata(func: OpOverload) -> bool:
    if (known := _depends.get(func)) is None:
        known = func.namespace in NAMESPACES and not any(tag in func.tags for tag in UNKNOWN)
        known = known and func not in FakeTensorMode().lift_fns
        _depends[func] = known
    return known


def _alike(a: FakeTensor, b: FakeTensor) -> bool:
    return a is b or (
        torch._C._dispatch_keys(a) == torch._C._dispatch_keys(b)
        and a.untyped_storage().nbytes() == b.untyped_storage().nbytes()
        and a.storage_offset() == b.storage_offset()
        and a.stride() == b.stride()
        and a.shape == b.shape
    )
