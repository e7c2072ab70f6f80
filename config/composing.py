"""What Hydra composes for a command line, before it composes it itself or where it does not."""

from __future__ import annotations

from collections.abc import Sequence

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from config.arguments import apart, folders_given, in_quotes
from config.files import FOLDER


def composed(words: Sequence[str], program: str = "train") -> DictConfig:
    """Return the settings of ``program`` ("train", "sample" …) with arguments ``words``, those of Hydra's
    ``--config-dir`` too. Raises what Hydra raises for words and files that it cannot compose."""
    places = ",".join(in_quotes(f"file://{folder.absolute()}") for folder in folders_given(words))
    overrides = [*([f"hydra.searchpath=[{places}]"] if places else ()), *apart(words)[1]]
    with initialize_config_dir(str(FOLDER), version_base="1.3"):
        return compose("config" if program == "train" else program, overrides=overrides)
