"""What Hydra composes for a command line, before it composes it itself or where it does not, and a check of
all jobs of a multirun (``-m``) before the first starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf, open_dict

from common.errors import ConfigError, require
from common.secrets import IN_FILES, REMOVED, scrub_words
from config.arguments import apart, further_folders, in_quotes, override_in
from config.files import FOLDER
from config.load import load, run_name

SECTIONS = ("loss", "model", "trainer")
"""What a file of config/loss sets; without its first line they lie within ``loss``."""
SHOWS = {"--cfg", "-c", "--info", "-i"}
"""Options with which Hydra starts no job."""


def composed(words: Sequence[str], program: str = "train") -> DictConfig:
    """Return the settings of ``program`` ("train", "sample" …) with arguments ``words``, those of Hydra's
    ``--config-dir`` too. Raises what Hydra raises for words and files that it cannot compose, and ConfigError
    as ``check_loss_file`` does."""
    places = ",".join(in_quotes(f"file://{folder.absolute()}") for folder in further_folders(words))
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
    file_name = chosen.rpartition("/")[2]
    require(
        cfg.get("trainer") is not None and not any(map(OmegaConf.is_dict, map(loss.get, SECTIONS))),
        "loss",
        chosen,
        f"its file loss/{chosen}.yaml must begin with the line '# @package _global_' and name its trainer, "
        "as in 'trainer: {_target_: trainers.paired.PairedPreferenceTrainer}'",
    )
    message = f"must be {file_name}, as its file loss/{chosen}.yaml is called"
    require(loss.get("name") == file_name, "loss.name", loss.get("name"), message)


def check_jobs(words: Sequence[str], program: str) -> None:
    """Check arguments of ``program`` ("train", "sample" …) that Hydra acts on, and with ``-m`` a multirun.

    Raises ConfigError for a setting of Hydra's own; for a secret, which Hydra would write into multirun.yaml;
    and for two jobs that would write to the same place. Raises Hydra's errors for what it cannot compose."""
    crossed = not SHOWS & {*words} and any(word in ("-m", "--multirun") for word in words)
    says = "is Hydra's own; runs_dir and exp_name say where runs are, -m starts several"
    for word in words:
        key, written = word.partition("=")[0].lstrip("+~"), IN_FILES.format("Hydra writes the command of -m")
        require(not (key + ".").startswith("hydra."), key, REMOVED, says)
        require(not crossed or scrub_words([word], show=False) == [word], key, REMOVED, written)
    if not crossed or any("hydra/sweeper=" in word for word in words):
        return
    places: dict[str, tuple[str, ...]] = {}
    options, settings = apart(words)
    for job in _jobs(settings):
        key, place = _place(job, program, options)
        if place is not None and (other := places.setdefault(place, job)) != job:
            message = " and ".join(
                " ".join(w for w in a if w not in b) for a, b in ((other, job), (job, other))
            )
            message = f"two jobs of this multirun ({message}) would both write to {place}; name each by what "
            raise ConfigError(key, Path(place).name, f"{message}differs, as in '{key}=mine-s${{seed}}'")


def _jobs(words: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the settings of each job, as Hydra's own sweeper makes them."""
    choices = [
        [f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()]
        if override.is_discrete_sweep()
        else [word]
        for word in words
        if (override := override_in(word)) is not None
    ]
    return list(product(*choices))


def _place(job: tuple[str, ...], program: str, options: Sequence[str]) -> tuple[str, str | None]:
    """Return (the setting that names it, the file or folder that a job writes)."""
    cfg = composed([*options, *job], program)
    if program == "train":
        config = load(cfg)
        return "exp_name", str(Path(config.runs_dir) / run_name(config, list(job)))
    out = OmegaConf.select(cfg, "out", throw_on_missing=False)
    if program == "eval":
        name = cfg.name or f"{cfg.kind}-{cfg.data.name}"
        return "name", str(Path(out or str(cfg.run)) / f"{name}.json")
    return "out", out
