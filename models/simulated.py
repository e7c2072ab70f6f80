"""Whether a computation is to take the ways of a GPU: because its tensors lie on one, or because a simulation
of one is under way, whose tensors have shapes and no values (jobs/memory_simulation.py)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

_simulated: ContextVar[bool] = ContextVar("simulated", default=False)


@contextmanager
def simulated_gpu(whether: bool = True) -> Iterator[None]:
    """Within the context everything goes the ways of a GPU, wherever it lies; nothing changes without
    ``whether``."""
    token = _simulated.set(whether)
    try:
        yield
    finally:
        _simulated.reset(token)


def simulates_gpu() -> bool:
    """Whether a GPU is only simulated."""
    return _simulated.get()


def on_gpu(tensor: Tensor) -> bool:
    """Whether what is computed with this tensor is computed on a GPU."""
    return tensor.is_cuda or _simulated.get()


def has_gpu() -> bool:
    """Whether the model is computed on a GPU."""
    return _simulated.get() or torch.cuda.is_available()
