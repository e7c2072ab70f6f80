"""Settings of further evaluation sets (``evaluations``): their names, and where their rows come from."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from common.errors import ConfigError, DataError, UserError, one_of, require
from config.schema_data import DataConfig
from config.sections import typed

OF_ROWS = ("loss", "reward_chosen", "reward_rejected", "reward_margin", "reward_accuracy", "drift")
OF_ANSWERS = ("accuracy_sampled", "accuracy_greedy", "length_sampled")
MEASURED = (*OF_ROWS, *OF_ANSWERS)
"""Measures of every set, including the unnamed one: ``eval_<measure>``, ``eval_<name>_<measure>``."""
_ONLY_UNNAMED = ("kl_initial",)
RANKED = ("loss", "reward_margin", "reward_accuracy", "accuracy_sampled", "accuracy_greedy")
"""Measures that ``keep_best`` may name."""
KEYS = ("path", "split", "verifier")
"""Settings of an evaluation set. All others are those of the run's own data."""
_OF_FILES = ("data.sources.local", "data.sources.hub_table")
_OWN_WORD = {"eval_path": "path", "eval_split": "split"}
"""Settings of the data -> their names here."""
_OF_DATA = re.compile(rf"\bdata\.({'|'.join((*KEYS, *_OWN_WORD))})\b")
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*", re.ASCII)


def named_measure(key: str) -> tuple[str, str] | None:
    """Return ("hard", "loss") for ``eval_hard_loss``; None for a key that is not a measure of a named set."""
    rest = key.removeprefix("eval_")
    if rest == key or rest in (*MEASURED, *_ONLY_UNNAMED):
        return None
    suffix = next((measure for measure in MEASURED if rest.endswith(f"_{measure}")), None)
    return None if suffix is None else (rest.removesuffix(f"_{suffix}"), suffix)


def check_keep_best(key: str | None, evaluations: Mapping[str, Any]) -> None:
    """Raise ConfigError if ``keep_best`` is not a measure of the run."""
    named = (f"eval_{name}_{measure}" for name in evaluations for measure in RANKED)
    one_of("keep_best", key or "off", ("off", *(f"eval_{measure}" for measure in RANKED), *named))


def evaluation_sets(evaluations: Mapping[str, Any], own: DataConfig) -> dict[str, DataConfig]:
    """Return the data settings of each set by its name; its rows are the split "eval" of these settings.
    ``own`` are the settings of the run's data, from which a set starts.

    Raises ConfigError for an invalid name, a name that collides with a number of the run, an unknown key or a
    wrong type.
    """
    for name in evaluations:
        _check_name(name)
    return {name: _settings(name, given, own) for name, given in evaluations.items()}


def _check_name(name: str) -> None:
    key = f"evaluations.{name}"
    require(
        _NAME.fullmatch(name) is not None,
        key,
        name,
        "is a name of letters, digits and _, which begins with a letter",
    )
    taken = [m for m in (*MEASURED, *_ONLY_UNNAMED) if m == name or m.startswith(f"{name}_")]
    require(
        not taken,
        key,
        name,
        f"would stand before its numbers as in eval_{(taken or [''])[0]}, a number of the run; take another",
    )


def _settings(name: str, given: Any, own: DataConfig) -> DataConfig:
    key = f"evaluations.{name}"
    mapping = f"is a mapping, as in {key}.path=hard.jsonl"
    require(isinstance(given, dict) and bool(given), key, given, mapping)
    for word, value in given.items():
        require(
            word in KEYS, f"{key}.{word}", value, f"is not a setting of a set; it takes {', '.join(KEYS)}"
        )
    path, split = given.get("path"), given.get("split")
    differs = any(value is not None for value in given.values())
    require(differs, key, given, "names the run's own held-out rows; give path or split")
    files = own.source in _OF_FILES
    no_splits = f"data={own.name} has no splits to choose from; give a path"
    require(split is None or path is not None or files, f"{key}.split", split, no_splits)
    settings = asdict(own)
    if split is not None:  # of the path: the set's, or the run's own
        settings |= {"eval_path": None, "eval_split": split} | ({} if path is None else {"path": path})
    elif path is not None:
        settings |= {"path": path, "eval_path": path, "eval_split": None}
    if path is not None and not files:
        # The settings of a task for its own files do not apply to another file.
        settings["source"] = _OF_FILES[0]
    if path is not None:
        settings["mix"] = None
    if "verifier" in given:
        settings["verifier"] = given["verifier"]
    try:
        return typed(settings, DataConfig, f"{key}.")
    except ConfigError as error:
        raise of_set(key, error) from error


def of_set(key: str, error: ConfigError | DataError) -> UserError:
    """Return an error about ``data`` as an error about the set ``key`` of ``evaluations``."""
    if isinstance(error, DataError):
        return DataError(f"{key}: {error}")
    if error.key == key:
        return error
    section, _, word = error.key.removeprefix(f"{key}.").rpartition(".")
    if section not in ("", "data"):
        return ConfigError(error.key, error.value, f"for {key}, {error.remedy}")
    word = _OWN_WORD.get(word, word)
    remedy = _OF_DATA.sub(lambda match: f"{key}.{_OWN_WORD.get(match[1], match[1])}", error.remedy)
    return ConfigError(f"{key}.{word}" if word in KEYS else key, error.value, remedy)
