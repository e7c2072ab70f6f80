"""Architectures of the models that the shipped recipes name, available without a network."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from accelerate import init_empty_weights
from huggingface_hub import try_to_load_from_cache
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from config.schema_model import ModelConfig
from models.pretrained import model_config
from models.quantization import quantised

FILE = Path(__file__).with_suffix(".json")


@cache
def known_shapes() -> dict[str, dict[str, Any]]:
    """Return name on the hub -> the part of its config.json that determines how large its tensors are."""
    shapes: dict[str, dict[str, Any]] = json.loads(FILE.read_text())
    return shapes


def architecture(config: ModelConfig) -> PretrainedConfig:
    """Return the architecture, from a folder or the hub's cache, else from the table of known ones, else from
    the hub.

    Raises ConfigError where it cannot be loaded.
    """
    path = config.path
    shape = None if Path(path).is_dir() else known_shapes().get(path)
    if shape is None or isinstance(
        try_to_load_from_cache(path, "config.json", revision=config.revision), str
    ):
        return model_config(config)
    return AutoConfig.for_model(**shape)


def count_weights(model: nn.Module) -> int:
    """Return how many numbers the parameters stand for, each counted once."""
    layers = quantised(model).values()
    more = sum(len(layer.packed) * (layer.columns - layer.packed.shape[1]) for layer in layers)
    return sum(p.numel() for p in model.parameters()) + more


def without_weights(hf_config: PretrainedConfig) -> PreTrainedModel:
    """Return the language model of this architecture with all tensors on the meta device."""
    with init_empty_weights():
        model: PreTrainedModel = AutoModelForCausalLM.from_config(hf_config)
    return model


def layer_work(hf_config: PretrainedConfig) -> int:
    """Return about how many numbers a layer holds per token at once.

    These are its input, its norm, and either queries, keys, values and attention output, or the three
    intermediate tensors of a gated MLP."""
    text = hf_config.get_text_config()
    inner = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    return int(2 * text.hidden_size + max(4 * text.hidden_size, 3 * inner))
