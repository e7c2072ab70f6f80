"""Settings that are texts, and get the text that was typed. Hydra's grammar reads 2024_10 as the number
202410 and 1e3 as 1000.0; a text made of such a number would be another name than the one that was typed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from common.errors import ConfigError
from common.imports import import_function
from config.arguments import in_quotes, override_in
from config.files import FOLDER, section
from config.schema import Config
from config.schema_data import DataConfig


def as_written(arguments: list[str]) -> list[str]:
    """Return the arguments with quotes around each value of a text setting that Hydra would read as a number
    or as true or false, and would write differently. Everything else stays unchanged."""
    return [_quoted(word) for word in arguments]


def other_text(key: str, text: str, value: Any) -> bool:
    """Return whether ``value``, read from ``text``, would give the text setting ``key`` another text."""
    return isinstance(value, bool | int | float) and str(value) != text and is_text(key)


def _quoted(word: str) -> str:
    override = override_in(word)
    if override is None or override.is_delete() or override.is_sweep_override():
        return word
    head, sign, typed = word.partition("=")
    text, key, value = typed.strip(), override.key_or_group, override.value()
    if other_text(key, text, value):
        return f"{head}{sign}{in_quotes(text)}"
    parts = [part.strip() for part in text[1:-1].split(",")]
    if not isinstance(value, list) or len(parts) != len(value):
        return word
    other = [other_text(key, part, item) for part, item in zip(parts, value, strict=True)]
    parts = [in_quotes(part) if changes else part for part, changes in zip(parts, other, strict=True)]
    return f"{head}{sign}[{','.join(parts)}]" if any(other) else word


def is_text(key: str) -> bool:
    """Return whether a setting of any program is a text, or a list of texts."""
    first, _, rest = key.partition(".")
    if first == "evaluations":
        return rest.partition(".")[2] in _texts(DataConfig)
    kind, _, last = rest.partition(".")
    if first == "reward":
        return any(last in _texts(schema) for schema in _reward_settings(kind))
    from config.schema_eval import EvalStage  # read here: a run needs neither
    from config.schema_stages import LabelStage, SampleStage

    of_texts = f"{key.rpartition('.')[0]}.*"
    return any({key, of_texts} & _texts(schema) for schema in (Config, SampleStage, LabelStage, EvalStage))


@cache
def _texts(schema: type) -> frozenset[str]:
    """Return the dotted names of a dataclass's settings that are texts; ``a.*`` for a mapping to texts."""
    return frozenset(_found(schema))


def _found(schema: type, prefix: str = "") -> Iterator[str]:
    hints = get_type_hints(schema)
    for item in fields(schema):
        hint, name = hints[item.name], f"{prefix}{item.metadata.get('key', item.name)}"
        for part in get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,):
            choices = get_args(part) if get_origin(part) is Literal else ()
            texts = part is str or (get_origin(part) is list and str in get_args(part))
            if texts or (choices and all(isinstance(choice, str) for choice in choices)):
                yield name
            elif get_origin(part) is dict and get_args(part)[1] is str:
                yield f"{name}.*"
            elif is_dataclass(part) and isinstance(part, type):
                yield from _found(part, f"{name}.")


def _reward_settings(kind: str) -> Iterator[type]:
    """Yield the types of the settings in section ``kind`` of the rewards that have it."""
    for path in sorted((FOLDER / "reward").glob("*.yaml")):
        tree = section(f"reward/{path.name}")
        if kind in tree and isinstance(tree[kind], dict):
            try:
                yield import_function("reward.settings_type", str(tree["settings_type"]))
            except (ConfigError, KeyError):  # whoever chooses this reward is told
                continue
