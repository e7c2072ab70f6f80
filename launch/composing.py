"""The settings of many runs, as ``python train.py`` would have them, without a call of Hydra for each run.

Hydra takes a fifth of a second to read its files; setting and checking a run's other values takes little.
"""

from __future__ import annotations

import copy
import re
from functools import reduce
from operator import getitem
from typing import Any

from omegaconf import OmegaConf

from common.errors import ConfigError
from config.cli import UNREADABLE, reworded
from config.composing import composed
from config.files import walk
from config.load import load
from config.schema import Config
from launch.grid import CONFIG_DIR, Run, override

_PLAIN_KEY = re.compile(r"(?!hydra\b)[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*", re.ASCII)
_READ_AS_MORE = re.compile(r"\$|[+-]?\.inf$")
"""Matches texts that Hydra or ``config.load`` does not take literally."""


def compose_config(overrides: list[str]) -> Config:
    """Return the settings that ``python train.py <overrides>`` would have. Raises UserError."""
    with reworded(overrides):
        return load(composed(overrides))


class Composer:
    """Makes the settings of a sweep's runs as ``compose_config`` does, but calls Hydra once for each choice
    of files.

    Settings of unusual form or value, and all that are refused, go through ``compose_config`` itself, which
    decides and words the error.
    """

    def __init__(self) -> None:
        self._bases: dict[tuple[str, ...], tuple[dict[str, Any], set[str], bool]] = {}

    def config(self, run: Run) -> Config:
        """Return the settings of ``run``. Raises UserError."""
        if all(map(_is_plain, run.all_settings.values())):
            try:
                return self._filled(run)
            except (*UNREADABLE, ConfigError, LookupError):
                pass
        return compose_config(run.overrides())

    def _filled(self, run: Run) -> Config:
        """Return the settings of ``run``. Raises LookupError for a setting that the composed files do not
        have."""
        choices = (override(key, value) for key, value in run.settings.items() if _chooses(key))
        base, keys, refers = self._base(tuple(choices))
        tree = copy.deepcopy(base)
        for key, value in run.all_settings.items():
            if not _chooses(key):
                if key not in keys:
                    raise LookupError(key)
                *sections, last = key.split(".")
                reduce(getitem, sections, tree)[last] = value
        return load(OmegaConf.create(tree) if refers else tree)

    def _base(self, choices: tuple[str, ...]) -> tuple[dict[str, Any], set[str], bool]:
        """Return the composed files of ``choices``, the set of settings that they have, and whether one of
        these refers to another."""
        if choices not in self._bases:
            tree: Any = OmegaConf.to_container(composed(list(choices)))
            self._bases[choices] = tree, {key for key, _ in walk(tree)}, "${" in repr(tree)
        return self._bases[choices]


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
