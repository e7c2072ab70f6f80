"""Check of a multirun (``-m``) before its first job starts: no secret gets into Hydra's files, and no two
jobs write to the same place."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path

from omegaconf import OmegaConf

from common.errors import ConfigError, require
from common.secrets import IN_FILES, REMOVED, scrub_words
from config.arguments import apart, override_in
from config.composing import composed
from config.load import load, run_name

SHOWS = {"--cfg", "-c", "--info", "-i"}
"""Options with which Hydra starts no job."""


def check_jobs(words: Sequence[str], program: str) -> None:
    """Check a multirun of ``program`` ("train", "sample" …) with arguments ``words``; without ``-m`` do
    nothing.

    Raises ConfigError for a secret, which Hydra would write into multirun.yaml, and for two jobs that would
    write to the same place, as with one ``exp_name``: the second would overwrite the first, or be refused
    after the first has trained. Raises Hydra's own errors for what it cannot compose.
    """
    if not {"-m", "--multirun"} & {*words} or SHOWS & {*words} or any("hydra/sweeper=" in w for w in words):
        return
    for word in words:
        said = IN_FILES.format("Hydra writes the command of a multirun")
        require(scrub_words([word]) == [word], word.partition("=")[0].lstrip("+"), REMOVED, said)
    places: dict[str, tuple[str, ...]] = {}
    options, settings = apart(words)
    for job in _jobs(settings):
        key, place = _place(job, program, options)
        if place is not None and (other := places.setdefault(place, job)) != job:
            said = " and ".join(" ".join(w for w in a if w not in b) for a, b in ((other, job), (job, other)))
            said = f"two jobs of this multirun ({said}) would both write to {place}; name each by what "
            raise ConfigError(key, Path(place).name, f"{said}differs, as in '{key}=mine-s${{seed}}'")


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
