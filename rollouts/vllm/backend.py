"""This project's additions inside vLLM's own workers, which are a weight transfer backend for one machine and
reading weights from a folder.

vLLM imports this module in each of its workers, before they make their backends, if its
``worker_extension_cls`` is ``rollouts.vllm.backend.WorkerExtension``. So the backend is known there by its
name.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

HEAD = "lm_head.weight"
BACKEND = "shared_memory"
EXTENSION = "rollouts.vllm.backend.WorkerExtension"


@dataclass
class SharedMemoryInitInfo(WeightTransferInitInfo):
    """Empty, because trainer and engine have nothing to agree on before the first weights."""


@dataclass
class SharedMemoryUpdateInfo(WeightTransferUpdateInfo):
    """Some of the weights, and the location of their bytes."""

    path: str
    """a file that can be mapped into memory; the path is valid while the call lasts"""
    size: int
    """size of the file in bytes"""
    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    offsets: list[int]
    """the first byte of each tensor, a multiple of its element size"""

    def __post_init__(self) -> None:
        lengths = {len(field) for field in (self.names, self.dtype_names, self.shapes, self.offsets)}
        if len(lengths) != 1:
            raise ValueError(f"names, dtype_names, shapes and offsets have {sorted(lengths)} entries")


class SharedMemoryEngine(WeightTransferEngine[SharedMemoryInitInfo, SharedMemoryUpdateInfo]):
    """Receives weights in checkpoint format in memory that the trainer shares, in any number of parts."""

    init_info_cls = SharedMemoryInitInfo
    update_info_cls = SharedMemoryUpdateInfo

    def init_transfer_engine(self, init_info: SharedMemoryInitInfo) -> None:
        """Does nothing, because there is no connection to set up."""

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":  # on a CPU torch has no accelerator to wait for
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: SharedMemoryUpdateInfo) -> None:
        self.model.load_weights(mapped(update_info))

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Does nothing, because a mapping is freed with the tensors that lie in it."""


def mapped(info: SharedMemoryUpdateInfo) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) for each of the weights. The tensors lie in the shared memory itself and keep it
    alive without its path, because vLLM may hold a layer's first tensors until the last of them has arrived.
    Raises OSError if the memory is not there."""
    with open(info.path, "rb") as file:
        # Copy-on-write, because torch has no read-only tensors.
        memory = mmap.mmap(file.fileno(), info.size, access=mmap.ACCESS_COPY)
    parts = zip(info.names, info.dtype_names, info.shapes, info.offsets, strict=True)
    for name, dtype_name, shape, offset in parts:
        dtype: torch.dtype = getattr(torch, dtype_name)
        if count := math.prod(shape):
            yield name, torch.frombuffer(memory, dtype=dtype, count=count, offset=offset).view(shape)
        else:
            yield name, torch.empty(shape, dtype=dtype)


with contextlib.suppress(ValueError):  # it is registered already
    WeightTransferEngineFactory.register_engine(BACKEND, SharedMemoryEngine)


class WorkerExtension:
    """Methods mixed into each of the engine's own workers (vLLM's ``worker_extension_cls``). Each one is
    called by ``collective_rpc`` and returns values that JSON can represent."""

    def has_own_head(self) -> list[bool]:
        """Return whether the model has an output head by that name, even if it is tied to the embeddings.
        Gemma's has none: its embeddings are also its head."""
        names = self.get_model().named_parameters(remove_duplicate=False)  # type: ignore[attr-defined]
        return [any(name == HEAD for name, _ in names)]

    def read_weights(self, folder: str) -> None:
        """Load the safetensors files of a Hugging Face folder in place. Raises FileNotFoundError if there are
        none."""
        tied = self.model_config.hf_text_config.tie_word_embeddings  # type: ignore[attr-defined]
        (has_head,) = self.has_own_head()
        tensors = checkpoint_tensors(Path(folder), add_head=tied and has_head)
        self.reload_weights(weights_iterator=tensors)  # type: ignore[attr-defined]


def checkpoint_tensors(folder: Path, add_head: bool) -> Iterator[tuple[str, torch.Tensor]]:
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
