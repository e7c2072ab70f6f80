"""``deterministic=true``: the same run on the same machine has the same bits, on GPUs too (docs/gpus.md)."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from common.errors import UserError

ENVIRONMENT: dict[str, Sequence[str]] = {
    "CUBLAS_WORKSPACE_CONFIG": (":4096:8", ":16:8"),
    "NCCL_ALGO": ("Ring", "Tree"),
    "FLASH_ATTENTION_DETERMINISTIC": ("1",),
    "TORCHINDUCTOR_DETERMINISTIC": ("1",),
    "VLLM_BATCH_INVARIANT": ("1",),
}
"""Variable -> the value that is set on a machine with a GPU, and others that are as good. They are those of
cuBLAS, NCCL (whose sums within a switch vary), flash-attn by transformers, torch.compile, and vLLM, whose
processes inherit them."""


_on = False


def compute_deterministically(gpu: bool) -> None:
    """Let torch choose operations whose bits do not vary from run to run, in the whole process, and refuse
    others when they are called. Called before anything is on the device. Raises UserError for a variable of
    the environment that says otherwise."""
    for name, values in ENVIRONMENT.items() if gpu else ():
        if os.environ.setdefault(name, values[0]) not in values:
            wanted = " or ".join(values)
            raise UserError(f"deterministic=true needs {name}={wanted}, not {os.environ[name]}: unset it")
    global _on
    _on = True
    torch.use_deterministic_algorithms(True)
    filling(False)  # nothing here reads such memory


def filling(on: bool) -> None:
    """Let torch write NaN into memory that it has just allocated, as its flag asks for by itself."""
    torch.utils.deterministic.fill_uninitialized_memory = on  # type: ignore[attr-defined]


def compute_as_torch_does() -> None:
    """Undo ``compute_deterministically``, if it was called, but for the environment."""
    global _on
    if _on:
        _on = False
        filling(True)
        torch.use_deterministic_algorithms(False)
