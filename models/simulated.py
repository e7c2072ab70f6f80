"""Whether a computation uses the code paths of a GPU, because its tensors lie on one, or because a GPU is
being simulated. The tensors of a simulation have shapes and no values (memory/simulate.py)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

_simulated: ContextVar[bool] = ContextVar("simulated", default=False)


@contextmanager
def simulated_gpu(whether: bool = True) -> Iterator[None]:
    """Use the code paths of a GPU within the context, wherever tensors lie; nothing changes where ``whether``
    is False."""
    token = _simulated.set(whether)
    try:
        yield
    finally:
        _simulated.reset(token)


def simulates_gpu() -> bool:
    """Return whether a GPU is being simulated."""
    return _simulated.get()


def on_gpu(tensor: Tensor) -> bool:
    """Return whether computations with this tensor use the code paths of a GPU."""
    return tensor.is_cuda or _simulated.get()


def has_gpu() -> bool:
    """Return whether the model's computations use the code paths of a GPU."""
    return _simulated.get() or torch.cuda.is_available()
