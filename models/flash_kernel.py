"""Choice of the flash kernel that computes attention on a GPU: FlashAttention-2, which torch brings, or
FlashAttention-3, which is faster on a Hopper GPU and which torch calls instead where the package flash-attn-3
is installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.attention import activate_flash_attention_impl, restore_flash_attention_impl

PACKAGE = "flash_attn_interface"
"""The module that flash-attn-3 installs."""
HOPPER = 9
"""Major number of the compute capability of the GPUs that FlashAttention-3 is written for."""


@dataclass(frozen=True)
class FlashKernel:
    """The kernel that this process uses. ``declined``: why it is not FlashAttention-3, though that is
    installed, or empty."""

    name: str = "FlashAttention-2"
    declined: str = ""

    def __str__(self) -> str:
        return self.name + f" ({self.declined})" * bool(self.declined)


def installed() -> bool:
    """Return whether flash-attn-3 is installed. It is not imported: that loads its kernels, of 800 MB."""
    return importlib.util.find_spec(PACKAGE) is not None


def choose(fails: Callable[[], str | None]) -> FlashKernel:
    """Make torch use the fastest flash kernel that works on this GPU, in the whole process, and return it.

    ``fails`` computes attention with the kernel that is in use and returns why that is wrong, or None. If it
    finds an error in FlashAttention-3, torch uses its own kernel again.
    """
    if not installed() or torch.cuda.get_device_capability()[0] != HOPPER:
        return FlashKernel()
    try:
        activate_flash_attention_impl("FA3")
        why = fails()
    except (ImportError, OSError, RuntimeError) as error:  # such as a package built for another torch
        why = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    if why is None:
        return FlashKernel("FlashAttention-3")
    restore_flash_attention_impl(_raise_warn=False)
    return FlashKernel(declined=f"flash-attn-3 is installed but does not work here: {why}")
