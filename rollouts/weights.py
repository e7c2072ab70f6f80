"""The location and the digest of a model's weight files."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import snapshot_download

from common.files import files_digest
from config.schema import Config


def model_folder(config: Config) -> Path:
    """Return the folder with the model's own files, which come from a run's folder, any folder or the hub."""
    path = Path(config.model.path)
    if path.is_dir():
        return path
    return Path(
        snapshot_download(
            config.model.name_or_path,
            revision=config.model.revision,
            allow_patterns=["*.json", "*.safetensors"],
        )
    )


def weights_digest(config: Config) -> str:
    """Return the digest of the model's weight files. Raises ConfigError if they cannot be obtained."""
    return files_digest(sorted(model_folder(config).glob("*.safetensors")))
