"""Architectures of the models that the shipped recipes name, available without a network."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from transformers import AutoConfig, PretrainedConfig

from config.schema_model import ModelConfig
from models.pretrained import model_config
from models.weight_files import resolve_model_path

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
    path = resolve_model_path(config.name_or_path)
    known = None if Path(path).is_dir() else known_shapes().get(path)
    if known is None or isinstance(
        try_to_load_from_cache(path, "config.json", revision=config.revision), str
    ):
        return model_config(config)
    return AutoConfig.for_model(**known)
