"""A digest of what decides a model's outputs besides its weights: its config, and the code that comes with
it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from common.files import files_digest
from config.schema_model import ModelConfig
from models.pretrained import model_config
from models.weight_files import resolve_model_path

WITHOUT_EFFECT = frozenset(
    {"_name_or_path", "_commit_hash", "transformers_version", "dtype", "torch_dtype", "architectures"}
)
"""Fields of a config, of a model within it too, that change no output: where it came from and what wrote it,
the dtype in which its files are stored (``model.dtype`` decides), and the name of the class."""


def architecture_digest(config: ModelConfig) -> str:
    """Return the digest of the model's config (rotary base, experts per token, windows, norms), 64 hex
    digits. The weights may be equal where it is not.

    With ``model.trust_remote_code`` it covers the model's own code too: a folder's files, or the hub's
    commit. Raises ConfigError if the config cannot be loaded."""
    hf_config = model_config(config)
    parts: dict[str, Any] = {"config": _plain(hf_config.to_dict())}
    if config.trust_remote_code:
        code = sorted(Path(resolve_model_path(config.name_or_path)).glob("*.py"))
        parts["code"] = [getattr(hf_config, "_commit_hash", None), files_digest(code)]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def _plain(value: Any) -> Any:
    """Return a config's content without the fields that have no effect, with names that JSON can sort."""
    if isinstance(value, dict):
        return {str(key): _plain(child) for key, child in value.items() if key not in WITHOUT_EFFECT}
    if isinstance(value, (list, tuple)):
        return [_plain(child) for child in value]
    return value
