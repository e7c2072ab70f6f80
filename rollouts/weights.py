"""The location and the digest of a model's weight files."""

from __future__ import annotations

from pathlib import Path
from shlex import quote

from huggingface_hub import snapshot_download

from common.errors import require
from common.files import files_digest
from config.schema import Config
from models.gguf import is_gguf
from models.weight_files import resolve_model_path


def model_folder(config: Config) -> Path:
    """Return the folder with the model's own files, which come from a run's folder, any folder or the hub.
    Raises ConfigError for a GGUF file."""
    name = config.model.name_or_path
    require(
        not is_gguf(name),
        "model.name_or_path",
        name,
        f"is one file, and another program needs a folder here: python -m tools.gguf {quote(name)} FOLDER "
        "writes one; sampler=embedded reads the file",
    )
    path = Path(resolve_model_path(config.model.name_or_path))
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
    if is_gguf(config.model.name_or_path):
        return files_digest([Path(config.model.name_or_path)])
    return files_digest(sorted(model_folder(config).glob("*.safetensors")))
