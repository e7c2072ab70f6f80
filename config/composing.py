"""What Hydra composes for a command line, before it composes it itself or where it does not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf, open_dict

from common.errors import require
from config.arguments import apart, folders_given, in_quotes
from config.files import FOLDER

SECTIONS = ("loss", "model", "trainer")
"""What a file of config/loss sets; without its first line they lie within ``loss``."""


def composed(words: Sequence[str], program: str = "train") -> DictConfig:
    """Return the settings of ``program`` ("train", "sample" …) with arguments ``words``, those of Hydra's
    ``--config-dir`` too. Raises what Hydra raises for words and files that it cannot compose, and ConfigError
    as ``check_loss_file`` does."""
    places = ",".join(in_quotes(f"file://{folder.absolute()}") for folder in folders_given(words))
    overrides = [*([f"hydra.searchpath=[{places}]"] if places else ()), *apart(words)[1]]
    with initialize_config_dir(str(FOLDER), version_base="1.3"):
        name = "config" if program == "train" else program
        cfg = compose(name, overrides=overrides, return_hydra_config=True)
    check_loss_file(cfg, cfg.hydra.runtime.choices)
    with open_dict(cfg):
        del cfg["hydra"]
    return cfg


def check_loss_file(cfg: DictConfig, choices: Mapping[str, str]) -> None:
    """Raise ConfigError for a file of config/loss that forgets its first line or its trainer, or has another
    name within. ``choices``: the file of each folder, as Hydra lists them."""
    if "loss" not in choices:
        return
    chosen, loss = choices["loss"], cfg.get("loss") or {}
    own = chosen.rpartition("/")[2]
    require(
        cfg.get("trainer") is not None and not any(map(OmegaConf.is_dict, map(loss.get, SECTIONS))),
        "loss",
        chosen,
        f"its file loss/{chosen}.yaml must begin with the line '# @package _global_' and name its trainer, "
        "as in 'trainer: {_target_: trainers.paired.PairedPreferenceTrainer}'",
    )
    said = f"must be {own}, as its file loss/{chosen}.yaml is called"
    require(loss.get("name") == own, "loss.name", loss.get("name"), said)
