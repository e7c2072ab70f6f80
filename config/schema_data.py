"""Settings of the data: where groups come from and which of them are kept; and of further evaluation sets
(``evaluations``): their names, and where their rows come from."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Annotated, Any, Literal

from pydantic import AfterValidator

from common.errors import ConfigError, DataError, UserError, one_of
from config.files import of_project
from config.sections import (
    All,
    NotNegative,
    Positive,
    Share,
    SmallShare,
    Text,
    dataclass,
    must,
    typed,
    yaml_defaults,
)

OfProject = Annotated[Text, AfterValidator(of_project)]
RANGE = (
    "give two shares of the groups, from the least likely on, as in [0.25, 1]: 0 <= low < high <= 1; or all"
)
"""What data.logprob_range takes."""
IS_RANGE = must(lambda ends: len(ends) == 2 and 0 <= ends[0] < ends[1] <= 1, RANGE)


Kept = Annotated[Share, "is a share of the examples"]


@dataclass
class MixPart:
    """One set of ``data=mix``: a file of config/data, its weight, and optionally another path to read it
    from."""

    name: Text
    weight: Positive = 1.0
    path: Text | None = None
    eval_path: Text | None = None


@dataclass
@yaml_defaults("data/_base.yaml")
class DataConfig:
    """Where groups come from. ``source`` is the import path of a function ``f(config, split) ->
    data.sources.Loaded``."""

    name: Text
    source: Text
    path: OfProject | None
    eval_path: OfProject | None
    revision: Text | None
    subset: Text | None
    data_dir: Text | None
    split: Text
    eval_split: Text | None
    eval_fraction: Annotated[SmallShare, "is the share of the prompts held out for evaluation"]
    format: Text
    columns: (
        Annotated[
            dict[str, Text],
            "; in quotes, as in 'data.columns={prompt: question, chosen: good, rejected: bad}'",
        ]
        | None
    )
    ignore_columns: list[Text] | None
    numbers: list[Text] | None
    max_unreadable: Annotated[Share, "is a share of the rows"]
    one_label: bool
    system_prompt: Text | None
    trained_turns: Literal["last", "all", "marked"] | None
    read_markup: Literal["auto", "off"]
    control_tokens: Literal["keep", "drop"]
    long_prompts: Literal["cut", "drop"]
    apply_chat_template: bool
    score_threshold: NotNegative
    verifier: Text | None
    frac_unique_desirable: Kept
    frac_unique_undesirable: Kept
    logprob_range: All[Annotated[list[float], IS_RANGE]]
    mix: list[MixPart] | None

    def __post_init__(self) -> None:
        mixes = self.source == "data.mix.mixed"
        example = "name the sets, as in 'data.mix=[{name: hh, weight: 0.7}, {name: shp, weight: 0.3}]'"
        if bool(self.mix) != mixes:
            raise ConfigError("data.mix", self.mix, example if mixes else "is for data=mix")


# -- further evaluation sets -----------------------------------------------------------------------

OF_ROWS = ("loss", "reward_chosen", "reward_rejected", "reward_margin", "reward_accuracy", "drift")
OF_ANSWERS = ("accuracy_sampled", "accuracy_greedy", "length_sampled")
MEASURED = (*OF_ROWS, *OF_ANSWERS)
"""Measures of every set, including the unnamed one: ``eval_<measure>``, ``eval_<name>_<measure>``."""
_ONLY_UNNAMED = ("kl_initial",)
RANKED = ("loss", "reward_margin", "reward_accuracy", "accuracy_sampled", "accuracy_greedy")
"""Measures that ``keep_best`` may name."""
_OF_FILES = ("data.sources.local", "data.sources.hub_table")
_OWN_WORD = {"eval_path": "path", "eval_split": "split"}
"""Settings of the data -> their names here."""
_SET_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*", re.ASCII)


@dataclass
class SetConfig:
    """Settings of an evaluation set. All others are those of the run's own data."""

    path: Text | None = None
    split: Text | None = None
    verifier: Text | None = None


KEYS = tuple(item.name for item in fields(SetConfig))
_OF_DATA = re.compile(rf"\bdata\.({'|'.join((*KEYS, *_OWN_WORD))})\b")


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


def evaluation_sets(evaluations: Mapping[str, Any], run_data: DataConfig) -> dict[str, DataConfig]:
    """Return the data settings of each set by its name; its rows are the split "eval" of these settings.
    ``run_data`` are the settings of the run's data, from which a set starts.

    Raises ConfigError for an invalid name, a name that collides with a number of the run, an unknown key or a
    wrong type.
    """
    for name in evaluations:
        _check_set_name(name)
    return {name: _settings_of_set(name, settings, run_data) for name, settings in evaluations.items()}


def _check_set_name(name: str) -> None:
    key = f"evaluations.{name}"
    if _SET_NAME.fullmatch(name) is None:
        raise ConfigError(key, name, "is a name of letters, digits and _, which begins with a letter")
    taken = [m for m in (*MEASURED, *_ONLY_UNNAMED) if m == name or m.startswith(f"{name}_")]
    if taken:
        raise ConfigError(
            key,
            name,
            f"would stand before its numbers as in eval_{taken[0]}, a number of the run; take another",
        )


def _settings_of_set(name: str, settings: Any, run_data: DataConfig) -> DataConfig:
    key = f"evaluations.{name}"
    mapping = f"is a mapping, as in {key}.path=hard.jsonl"
    if not isinstance(settings, dict) or not settings:
        raise ConfigError(key, settings, mapping)
    one = typed(settings, SetConfig, f"{key}.")
    if one == SetConfig():
        raise ConfigError(key, settings, "names the run's own held-out rows; give path or split")
    files = run_data.source in _OF_FILES
    no_splits = f"data={run_data.name} has no splits to choose from; give a path"
    if one.split is not None and one.path is None and not files:
        raise ConfigError(f"{key}.split", one.split, no_splits)
    changes: dict[str, Any] = {"verifier": one.verifier} if "verifier" in settings else {}
    if one.path is not None:
        changes |= {"path": one.path, "eval_path": one.path, "eval_split": None, "mix": None}
        if not files:  # the settings of a task for its own files do not apply to another file
            changes["source"] = _OF_FILES[0]
    if one.split is not None:  # of the path: the set's, or the run's own
        changes |= {"eval_path": None, "eval_split": one.split}
    return replace(run_data, **changes)


def of_set(key: str, error: ConfigError | DataError) -> UserError:
    """Return an error about ``data`` as an error about the set ``key`` of ``evaluations``."""
    if isinstance(error, DataError):
        return DataError(f"{key}: {error}")
    name, remedy = (
        _OF_DATA.sub(lambda match: f"{key}.{_OWN_WORD.get(match[1], match[1])}", text)
        for text in (error.key, error.remedy)
    )
    return ConfigError(name, error.value, remedy if name.startswith(key) else f"for {key}, {remedy}")
