"""Choice of the flash kernel that computes attention on a GPU: FlashAttention-2, which torch brings, or
FlashAttention-3, which is faster on a Hopper GPU and which torch calls instead where the package flash-attn-3
is installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch
from torch.nn.attention import (
    activate_flash_attention_impl,
    current_flash_attention_impl,
    restore_flash_attention_impl,
)

FASTER = "FA3"
"""torch's name of FlashAttention-3; its own kernel has none."""
PACKAGE = "flash_attn_interface"
"""The module that flash-attn-3 installs."""
HOPPER = 9
"""Major number of the compute capability of the GPUs that FlashAttention-3 is written for."""


def in_use() -> str:
    """Return the name of the flash kernel that this process uses."""
    return "FlashAttention-3" if current_flash_attention_impl() == FASTER else "FlashAttention-2"


def installed() -> bool:
    """Return whether flash-attn-3 is installed. It is not imported: that loads its kernels, of 800 MB."""
    return importlib.util.find_spec(PACKAGE) is not None


def choose(fails: Callable[[], str | None]) -> str | None:
    """Make torch use the fastest flash kernel that works on this GPU, in the whole process. Return why that
    is not FlashAttention-3, though it is installed, or None.

    ``fails`` computes attention with the kernel that is in use and returns why that is wrong, or None. If it
    finds an error in FlashAttention-3, torch uses its own kernel again.
    """
    if not installed() or torch.cuda.get_device_capability()[0] != HOPPER:
        return None
    try:
        activate_flash_attention_impl(FASTER)
        why = fails()
    except (ImportError, OSError, RuntimeError) as error:  # such as a package built for another torch
        why = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    if why is None:
        return None
    use_default()
    return f"flash-attn-3 is installed but does not work here: {why}"


def use_default() -> None:
    """Make torch use its own flash kernel again, in the whole process."""
    restore_flash_attention_impl(_raise_warn=False)
