"""Settings of further evaluation sets (``evaluations``): their names, and where their rows come from."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from common.errors import ConfigError, DataError, UserError, one_of, require
from config.files import group_file
from config.schema_data import DataConfig
from config.typed import typed

OF_ROWS = ("loss", "reward_chosen", "reward_rejected", "reward_margin", "reward_accuracy", "drift")
OF_ANSWERS = ("accuracy_sampled", "accuracy_greedy", "length_sampled")
MEASURED = (*OF_ROWS, *OF_ANSWERS)
"""Measures of every set, including the unnamed one: ``eval_<measure>``, ``eval_<name>_<measure>``."""
_ONLY_UNNAMED = ("kl_initial",)
RANKED = ("loss", "reward_margin", "reward_accuracy", "accuracy_sampled", "accuracy_greedy")
"""Measures that ``keep_best`` may name."""
KEYS = (
    "data",
    "path",
    "split",
    "revision",
    "subset",
    "data_dir",
    "format",
    "columns",
    "ignore_columns",
    "max_unreadable",
    "system_prompt",
    "score_threshold",
    "verifier",
    "mix",
)
"""Settings of an evaluation set: the file of config/data that it starts from, and the settings that override
it."""
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
    ``own`` are the settings of the run's data, from which a set without ``data`` starts.

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
    require(
        isinstance(given, dict) and bool(given),
        key,
        given,
        f"is a mapping, as in {key}.path=hard.jsonl or {key}.data=hh_helpful",
    )
    for word, value in given.items():
        require(
            word in KEYS, f"{key}.{word}", value, f"is not a setting of a set; it takes {', '.join(KEYS)}"
        )
    source = given.get("data")
    require(
        source is not None or any(given.get(word) is not None for word in KEYS),
        key,
        given,
        "names the run's own held-out rows; give path, split or another data",
    )
    require(source is None or isinstance(source, str), f"{key}.data", source, "is a file of config/data")
    start = asdict(own) if source is None else group_file("data", f"{key}.data", source)
    settings = start | {word: value for word, value in given.items() if word not in ("data", "path", "split")}
    settings |= _place(given)
    files = settings.get("source") in _OF_FILES
    if given.get("path") is not None and not files:
        # The settings of a task for its own files do not apply to another file.
        settings |= {"source": _OF_FILES[0], "mix": given.get("mix")}
    require(
        given.get("split") is None or given.get("path") is not None or files,
        f"{key}.split",
        given.get("split"),
        f"data={settings.get('name')} has no splits to choose from; give a path",
    )
    require(
        settings.get("path") != "???",
        f"{key}.path",
        None,
        f"data={source} is a set of your own: name its file",
    )
    return _typed(key, settings)


def _place(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings for the place of the rows: all of ``path``, or only its part ``split``. Without
    ``path``, ``split`` is a part of the set's own path."""
    path, split = given.get("path"), given.get("split")
    if split is not None:
        return {"eval_path": None, "eval_split": split} | ({} if path is None else {"path": path})
    return {} if path is None else {"path": path, "eval_path": path, "eval_split": None}


def _typed(key: str, settings: dict[str, Any]) -> DataConfig:
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
