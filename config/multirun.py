"""Check of a multirun (``-m``) before its first job starts: every job's settings can be used, and no two jobs
write to the same place."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import product
from pathlib import Path

from omegaconf import OmegaConf

from common.errors import ConfigError, require
from common.secrets import IN_FILES, REMOVED, scrub_words
from config.arguments import apart, override_in
from config.composing import composed
from config.files import FOLDER
from config.load import OPERATIONAL, load, run_name

NAMELESS = ("experiment", "trackers")
"""Folders of config/ whose choice no setting names."""
SHOWS = {"--cfg", "-c", "--info", "-i", "--help", "-h"}
"""Options with which Hydra starts no job."""
_IN_NAMES = re.compile(r"[\w.+-]+", re.ASCII)


def check_jobs(words: Sequence[str], program: str) -> None:
    """Compose the settings of every job of a multirun of ``program`` ("train", "sample" …) with arguments
    ``words``; without ``-m`` do nothing.

    Raises ConfigError for settings that cannot be used and for two jobs that would write to the same place,
    as with one ``exp_name``: the second would overwrite the first, or be refused after the first has trained.
    Also for a secret, which Hydra would write into multirun.yaml.
    Raises Hydra's own errors for what it cannot compose.
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
            said = f"two jobs of this multirun ({said}) would both write to {place}: "
            raise ConfigError(key, Path(place).name, said + _instead(key, place, settings))


def _instead(key: str, place: str, words: Sequence[str]) -> str:
    """Return what to do about two jobs with one ``place``, which the setting ``key`` names."""
    swept = {
        override.key_or_group: [*override.sweep_string_iterator()]
        for override in filter(None, map(override_in, words))
        if override.is_discrete_sweep() and override.key_or_group != key
    }
    computed = not any(
        name.partition(".")[0] in OPERATIONAL for name in swept
    )  # so an automatic name differs
    ways = ["leave exp_name out"] if computed and any(word.startswith("exp_name=") for word in words) else []
    if swept and all(name not in NAMELESS and all(map(_IN_NAMES.fullmatch, swept[name])) for name in swept):
        parts = [
            f"${{{name}.name}}"
            if (FOLDER / name).is_dir()
            else f"{'s' if name == 'seed' else name.rpartition('.')[2]}${{{name}}}"
            for name in swept
        ]
        own = "-".join(["mine", *parts]) + (Path(place).suffix if key == "out" else "")
        ways.append(f"give each a name of its own, as in '{key}={own}'")
    return ", or ".join(ways) or f"start each by itself, with {key}= of its own"


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
