"""The tensors in a model's files, as their headers describe them, and whether they are finite."""

from __future__ import annotations

from pathlib import Path

import torch
from huggingface_hub import try_to_load_from_cache
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightConverter

from common.errors import ConfigError
from common.files import resolve_model_path
from config.schema_model import ModelConfig
from models.sharding import local_part
from models.weight_files import FLOATS, Stored, check_files, weights_are_there

KEY = "model.name_or_path"


def stored_tensors(config: ModelConfig) -> dict[str, Stored] | None:
    """Return the tensors in the model's files by name; None where not all of them are on this machine yet.
    Raises ConfigError (``check_files``)."""
    path = Path(resolve_model_path(config.name_or_path))
    if not path.is_dir():
        cached = try_to_load_from_cache(config.name_or_path, "config.json", revision=config.revision)
        path = Path(cached).parent if isinstance(cached, str) else path
        if not weights_are_there(path):
            return None
    return check_files(KEY, config.name_or_path, path)


def stored_alike(config: ModelConfig) -> torch.dtype | None:
    """Return the dtype of all weights in the model's files, where these are the policy's own but for the
    dtype. Then they can stay in the files, which safetensors maps, until a part of them is read. None where
    weights are computed (``model.new_tokens``, ``model.quantization``, a head, adapters over another dtype),
    where dtypes differ, and where not all files are on this machine."""
    if config.from_config or config.new_tokens or config.head or config.quantization:
        return None
    # float64 is trained as float32, which rounds it
    dtypes = {
        None if tensor.dtype == "F64" else FLOATS.get(tensor.dtype)
        for tensor in (stored_tensors(config) or {}).values()
    }
    dtype = getattr(torch, dtypes.pop() or "", None) if len(dtypes) == 1 else None
    return None if config.use_peft and dtype != getattr(torch, config.dtype) else dtype


def left_in_files(model: PreTrainedModel) -> bool:
    """Return whether transformers left all weights in their files: it computed none of them from several."""
    return not any(
        isinstance(conversion, WeightConverter) for conversion in getattr(model, "_weight_conversions", ())
    )


def check_finite(model: nn.Module, config: ModelConfig) -> None:
    """Raise ConfigError for weights, in this rank's part, that are not finite numbers; it names a tensor and
    the file that has it."""
    name = next((name for name, p in model.named_parameters() if not _finite(local_part(p.detach()))), None)
    if name is None:
        return
    place = next(
        (
            f"{tensor} in {file}"
            for file in sorted({stored.file for stored in (stored_tensors(config) or {}).values()})
            for tensor, values in load_file(file).items()
            if not _finite(values)
        ),
        f"{name}, once loaded in {config.dtype}",
    )
    raise ConfigError(
        KEY,
        config.name_or_path,
        f"has weights that are not finite numbers (NaN or infinity): {place}; fetch the model again, or take "
        "an earlier checkpoint",
    )


def _finite(values: torch.Tensor) -> bool:
    return values.element_size() < 2 or not values.is_floating_point() or bool(values.isfinite().all())
