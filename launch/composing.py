"""The settings of many runs, as ``python train.py`` would have them, without a call of Hydra for each run.

Hydra takes a fifth of a second to read its files; setting a run's other values takes a hundredth.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from common.errors import ConfigError
from config.load import load
from config.schema import Config
from config.typed import refuse_not_finite, structured
from launch.grid import CONFIG_DIR, Run, Settings, override

_PLAIN_KEY = re.compile(r"(?!hydra\b)[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*", re.ASCII)
_OWN = re.compile(r"seed|exp_name|resume|idle_settings|wandb")
_READ_AS_MORE = re.compile(r"\$|[+-]?\.inf$")
"""Matches texts that Hydra or ``config.load`` does not take literally."""


def compose_config(overrides: list[str]) -> Config:
    """Return the settings that ``python train.py <overrides>`` would have. Raises ConfigError."""
    try:
        return load(_composed(overrides))
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(
            "override", " ".join(overrides), " ".join(f"{error} {error.__cause__ or ''}".split())
        ) from error


class Composer:
    """Makes the settings of a sweep's runs as ``compose_config`` does, but calls Hydra once for each choice
    of files.

    Settings of unusual form or value, and all that are refused, go through ``compose_config`` itself, which
    decides and words the error.
    """

    def __init__(self) -> None:
        self._bases: dict[tuple[str, ...], tuple[DictConfig, set[str], bool]] = {}
        self._settings: Settings | None = None
        self._cell: tuple[DictConfig, set[str]]
        """The base with ``_settings`` applied, which runs that differ by their seed alone have in common."""
        self._made: Config | None = None
        """The settings of a run of this cell, if no other setting reads its own."""
        self._apart: bool

    def config(self, run: Run) -> Config:
        """Return the settings of ``run``. Raises ConfigError."""
        if all(map(_is_plain, run.given.values())):
            try:
                return self._filled(run)
            except (HydraException, OmegaConfBaseException, ConfigError, _NotThereError):
                self._settings = self._made = None
        return compose_config(run.overrides())

    def _filled(self, run: Run) -> Config:
        if self._made is not None and self._settings is run.settings and _is_usual(run):
            wandb = replace(self._made.wandb, tags=run.own["wandb.tags"])
            others = {key: value for key, value in run.own.items() if key != "wandb.tags"}
            return replace(self._made, **others, wandb=wandb)
        if self._settings is not run.settings:
            self._made = None
            base, known, self._apart = self._base(
                tuple(override(key, value) for key, value in run.settings.items() if _chooses(key))
            )
            cell = copy.deepcopy(base)
            _set(cell, known, {key: value for key, value in run.settings.items() if not _chooses(key)})
            self._settings, self._cell = run.settings, (cell, known)
        _set(*self._cell, run.own)
        config = OmegaConf.to_object(self._cell[0])
        assert isinstance(config, Config)
        refuse_not_finite(config)
        if self._apart:
            self._made = config
        return config

    def _base(self, choices: tuple[str, ...]) -> tuple[DictConfig, set[str], bool]:
        """Return the composed files of ``choices`` with the types of ``Config``, not validated yet, the set
        of settings that they have, and whether none of them reads a setting that a run has for itself."""
        if choices not in self._bases:
            made = _composed(list(choices))
            base = OmegaConf.merge(structured(Config), made)
            assert isinstance(base, DictConfig)
            tree = OmegaConf.to_container(made)
            self._bases[choices] = base, set(_keys(tree)), not any(map(_reads_own, _texts(tree)))
        return self._bases[choices]


class _NotThereError(Exception):
    """A setting that the composed files do not have."""


def _composed(overrides: list[str]) -> DictConfig:
    with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        return compose("config", overrides=overrides)


def _is_usual(run: Run) -> bool:
    """Return whether the run's own settings have their types, which nothing else checks."""
    return type(run.seed) is int and {*run.own} == {
        "seed",
        "exp_name",
        "resume",
        "idle_settings",
        "wandb.tags",
    }


def _reads_own(text: str) -> bool:
    """Return whether a text may read a setting that a run has for itself."""
    return "${" in text and _OWN.search(text) is not None


def _texts(tree: Any) -> Iterator[str]:
    """Yield every text of a tree of settings."""
    if isinstance(tree, dict | list):
        for item in tree.values() if isinstance(tree, dict) else tree:
            yield from _texts(item)
    elif isinstance(tree, str):
        yield tree


def _set(config: DictConfig, known: set[str], values: Settings) -> None:
    for key, value in values.items():
        if key not in known:
            raise _NotThereError
        OmegaConf.update(config, key, value, merge=True)


def _chooses(key: str) -> bool:
    """Whether a setting is more than a value: it chooses a file, or its key uses a sign of Hydra's
    grammar."""
    return _PLAIN_KEY.fullmatch(key) is None or (CONFIG_DIR / key.replace(".", "/")).is_dir()


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(_is_plain(item) and not isinstance(item, list) for item in value)
    if isinstance(value, str):
        return _READ_AS_MORE.search(value) is None
    return value is None or isinstance(value, bool | int | float)


def _keys(tree: Any, prefix: str = "") -> Iterator[str]:
    """Yield every dotted key of a tree of settings, including the keys of whole sections."""
    if isinstance(tree, dict):
        for key, item in tree.items():
            yield f"{prefix}{key}"
            yield from _keys(item, f"{prefix}{key}.")
