"""Weights that reach a node's engines through a folder, which lives until they are loaded, and their reading
within vLLM: each of its workers imports this module, for its ``worker_extension_cls``."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

HEAD = "lm_head.weight"
EXTENSION = "rollouts.vllm.folders.WorkerExtension"
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


class WorkerExtension:
    """Methods mixed into each of the engine's own workers (vLLM's ``worker_extension_cls``). Each one is
    called by ``collective_rpc`` and returns values that JSON can represent."""

    def has_output_head(self) -> list[bool]:
        """Return whether the model has an output head by that name, even if it is tied to the embeddings.
        Gemma's has none: its embeddings are also its head."""
        names = self.get_model().named_parameters(remove_duplicate=False)  # type: ignore[attr-defined]
        return [any(name == HEAD for name, _ in names)]

    def read_weights(self, folder: str) -> None:
        """Load the safetensors files of a Hugging Face folder in place. Raises FileNotFoundError if there are
        none."""
        tied = self.model_config.hf_text_config.tie_word_embeddings  # type: ignore[attr-defined]
        (has_head,) = self.has_output_head()
        tensors = checkpoint_tensors(Path(folder), add_head=tied and has_head)
        self.reload_weights(weights_iterator=tensors)  # type: ignore[attr-defined]


def checkpoint_tensors(folder: Path, add_head: bool) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) for everything in the folder's safetensors files. ``add_head``: also yield the
    embeddings as the output head if the files have no head.

    A tied checkpoint is saved without its head. An engine whose model has a separate head (as vLLM's Llama
    and Qwen do on a CPU) would keep the old one and report success.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"no *.safetensors in {folder}")
    head, embeddings = False, None
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a dict)
                tensor = tensors.get_tensor(name)
                head = head or name == HEAD
                if name.endswith("embed_tokens.weight"):
                    embeddings = tensor
                yield name, tensor
    if add_head and not head and embeddings is not None:
        yield HEAD, embeddings
