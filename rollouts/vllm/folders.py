"""Weights that reach a node's engines through a folder, which lives until they are loaded."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

MEMORY = Path("/dev/shm")
"""The file system in the machine's memory (tmpfs)."""
PART = 1 << 30
"""Bytes of weights that are written to one file, and held on the CPU for it."""


def place_of(folder: Path, node: int, size: int) -> Path:
    """Return where the leader of ``node`` writes ``size`` bytes of weights: in memory if this takes at most
    half of what is free there, else within ``folder``, which is the round's."""
    name = f"humanline-{hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]}-{node}"
    return MEMORY / name if MEMORY.is_dir() and 2 * size <= free_memory() else folder / name


def free_memory() -> int:
    """Return the bytes that files in memory may still take, by their file system and by what the machine has
    available."""
    free = shutil.disk_usage(MEMORY).free
    lines = Path("/proc/meminfo").read_text().splitlines()
    return min(free, *(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")))


def write_model(weights: Iterable[tuple[str, Tensor]], model_config: str, folder: Path) -> None:
    """Write config.json and the weights, as engines load them, to ``folder``. Every rank of a run goes
    through ``weights`` in step, so the one that writes goes through all of them even if it fails. Raises
    OSError."""
    rest = iter(weights)
    try:
        shutil.rmtree(folder, ignore_errors=True)  # what a run that was killed has left
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(model_config, encoding="utf-8")
        for number, part in enumerate(_parts(rest)):
            save_file(part, folder / f"model-{number:05d}.safetensors", {"format": "pt"})
    finally:
        for _ in rest:
            pass


def _parts(weights: Iterator[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """Yield the weights on the CPU, those of one file at a time."""
    part: dict[str, Tensor] = {}
    size = 0
    for name, tensor in weights:
        # a copy, as safetensors takes no two tensors of the same memory
        part[name] = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        size += tensor.numel() * tensor.element_size()
        if size >= PART:
            yield part
            part, size = {}, 0
    if part:
        yield part
