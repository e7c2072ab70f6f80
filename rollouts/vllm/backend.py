"""This project's addition inside vLLM's own workers, which is reading weights from a folder.

vLLM imports this module in each of its workers if its ``worker_extension_cls`` is
``rollouts.vllm.backend.WorkerExtension``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open

HEAD = "lm_head.weight"
EXTENSION = "rollouts.vllm.backend.WorkerExtension"


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
