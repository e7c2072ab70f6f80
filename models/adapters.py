"""LoRA adapters by themselves, exported as a folder that PEFT, transformers and vLLM load onto the base
model, or perturbed with noise to see who reads them."""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from peft.tuners import lora
from peft.tuners.lora import LoraLayer
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from config.schema_model import ModelConfig
from models.distributed import local, local_part, reshard
from models.export import whole_folder
from models.policy import Policy
from models.pretrained import empty_policy

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PERTURBED = 0.2
"""Noise on adapters changes each weight matrix under them by this share of its norm. Token log-probabilities
then change by tenths of a nat and more, which no rounding explains."""
_NAME = re.compile(r"(\.lora_\w+)\.[^.]+(\.weight)?$")


def adapter_state(policy: Policy) -> dict[str, Tensor]:
    """Return every adapter weight whole, on the CPU, under PEFT's names in files. Every rank calls it, in
    step with the others; no other weight of the model is gathered."""
    return {
        _NAME.sub(r"\1\2", name.removeprefix("model.")): local(tensor.detach()).to("cpu", copy=True)
        for name, tensor in get_model_state_dict(policy).items()
        if isinstance(tensor, Tensor) and name.startswith("model.") and ".lora_" in name
    }


def export_adapters(
    state: dict[str, Tensor], policy: Policy, base: Path, folder: Path, dtype: torch.dtype
) -> None:
    """Write ``adapter_state`` to ``folder`` in PEFT's format and in ``dtype``, whole or not at all. The base
    model, which lies in ``base``, is not written. One rank calls it. Raises OSError where it cannot be
    written."""
    model = policy.model
    assert isinstance(model, PeftModel)
    config = copy.deepcopy(model.peft_config[model.active_adapter])
    config.base_model_name_or_path, config.inference_mode = str(base), True
    with whole_folder(folder) as part:
        part.mkdir(parents=True)
        tensors = {name: tensor.to(dtype).contiguous() for name, tensor in state.items()}
        save_file(tensors, part / WEIGHTS, metadata={"format": "pt"})
        config.save_pretrained(str(part))


@dataclass(frozen=True)
class AdapterFolder:
    """Description of a folder of adapters, from its own files."""

    base: str
    """the base model: a folder, or a name on the hub"""
    rank: int
    modules: tuple[str, ...]
    """the last part of the names of the layers that have adapters: q_proj, …"""


def adapter_folder(folder: Path) -> AdapterFolder | None:
    """Return the description of ``folder``, or None where it holds no adapters. Raises OSError, ValueError or
    SafetensorError for damaged files."""
    if not (folder / CONFIG).is_file():
        return None
    config: dict[str, Any] = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    with safe_open(folder / WEIGHTS, framework="pt") as tensors:
        layers = {name.split(".lora_")[0] for name in tensors.keys()}  # noqa: SIM118 (not a dict)
    modules = tuple(sorted({layer.rpartition(".")[2] for layer in layers}))
    return AdapterFolder(config["base_model_name_or_path"], config["r"], modules)


def adapted_modules(config: ModelConfig) -> tuple[str, ...]:
    """Return the names of the layers that get adapters, as in ``AdapterFolder.modules``, from the model
    without its weights."""
    named = empty_policy(config).model.named_modules()
    return tuple(sorted({name.rpartition(".")[2] for name, module in named if isinstance(module, LoraLayer)}))


@contextmanager
def perturbed(policy: Policy) -> Iterator[None]:
    """Add noise to the policy's adapters, the same on every rank's replica, and restore them once the context
    ends. Fresh adapters change nothing, so only with noise does it show whether they are read at all."""
    reshard(policy)
    ups = list(_ups(policy.model))
    kept = [local_part(up.detach()).clone() for up, _ in ups]
    made = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for up, deviation in ups:
            own = local_part(up.detach())
            own.add_(torch.randn(own.shape, generator=made).to(own) * deviation)
    try:
        yield
    finally:
        reshard(policy)
        with torch.no_grad():
            for (up, _), before in zip(ups, kept, strict=True):
                local_part(up.detach()).copy_(before)


def _ups(model: nn.Module) -> Iterator[tuple[Tensor, float]]:
    """Yield (the half that is 0 at first, the standard deviation of the noise on it) of each adapter: B, or A
    of an embedding's. The noise is such that ``scaling B A``, with the other half as initialised (entries of
    variance 1 / (3 in), or 1), has ``PERTURBED`` times the norm of the base matrix."""
    layers: Iterator[Any] = (module for module in model.modules() if isinstance(module, LoraLayer))
    for layer in layers:
        (adapter,) = layer.active_adapters
        norm = float(local(layer.get_base_layer().weight.detach().float().norm()))
        if isinstance(layer, lora.Embedding):
            zero, columns = layer.lora_embedding_A[adapter], layer.lora_embedding_B[adapter].shape[0]
            spread = math.sqrt(zero.numel() * columns)
        else:
            zero = layer.lora_B[adapter].weight
            spread = math.sqrt(zero.numel() / 3)
        yield zero, PERTURBED * norm / (layer.scaling[adapter] * spread)
