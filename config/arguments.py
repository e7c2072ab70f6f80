"""Conversion of command lines as people type them: options in other programs' form become settings, and
choices of files that do not exist are refused with a suggestion."""

from __future__ import annotations

import argparse
import os
import re
import shlex
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException
from yaml import YAMLError  # type: ignore[import-untyped]

from common.errors import ConfigError, require
from config.files import FOLDER, MOST_VALUES, too_many
from config.unknown_keys import no_file

HYDRAS = {name: action.nargs is None for name, action in get_args_parser()._option_string_actions.items()}
"""Hydra's own options -> whether each takes a value. ``--info`` may have one."""
_OPTION = re.compile(r"--(?P<name>[A-Za-z][\w.-]*)(?:=(?P<value>.*))?", re.DOTALL)
FREE = re.compile(r"(evaluations|callbacks|humanline_rule)[.=]|(data\.columns|model\.chat_template_kwargs)\.")
"""Settings whose keys the user defines. Hydra adds a key to a mapping only if it is told to."""
DATA_FILES = (".json", ".jsonl", ".parquet", ".csv", ".gz")


def as_settings(arguments: list[str], names_run: bool = False) -> list[str]:
    """Turn ``--lr 1e-5``, ``--lr=1e-5`` and ``--resume`` into ``lr=1e-5`` and ``resume=true``. A ``-`` within
    a name becomes a ``_``, and several values become a list. Mappings whose keys the user defines get Hydra's
    ``++``. With ``names_run`` words without a ``=`` are folders of runs, ``run=…``. Hydra's own options come
    first, as Hydra wants it. Everything else stays unchanged."""
    words, rest = [], list(arguments)
    while rest:
        word = rest.pop(0)
        match = _OPTION.fullmatch(word)
        if match is None or word.partition("=")[0] in HYDRAS:
            words.append(word)
            continue
        values = [] if match["value"] is None else [match["value"]]
        while match["value"] is None and rest and _is_value(rest[0]):
            values.append(rest.pop(0))
        value = f"[{','.join(values)}]" if len(values) > 1 else values[0] if values else "true"
        words.append(f"{match['name'].replace('-', '_')}={value}")
    options, words = apart(words)
    words = ["~reward" if word in ("reward=none", "reward=null") else word for word in words]
    if names_run and (runs := [word for word in words if "=" not in word and word[:1] not in "~-"]):
        folders = runs[0] if len(runs) == 1 else f"[{','.join(map(in_quotes, runs))}]"
        named = as_typed("run", folders) if len(runs) == 1 else f"run={folders}"
        words = [named, *(word for word in words if word not in runs)]
    return [*options, *(f"++{word}" if FREE.match(word) else word for word in words)]


def apart(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return Hydra's own options, each with its value behind it, and the other words. An option that lacks
    its value is the last of these, or a setting would be taken for it."""
    options: list[str] = []
    others: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        takes_value = HYDRAS.get(word, False)
        if not word.startswith("-") or (takes_value and not rest):
            others.append(word)
            continue
        options.append(word)
        if takes_value or (word in ("--info", "-i") and rest and re.fullmatch(r"[a-z-]+", rest[0])):
            options.append(rest.pop(0))
    return options, others


def _is_value(word: str) -> bool:
    """Return whether a word after an option is its value: neither another option nor a setting."""
    return "=" not in word and (not word.startswith("-") or re.match(r"-\.?\d", word) is not None)


def wrong_choices(arguments: Sequence[str]) -> dict[str, ConfigError]:
    """Return the refusal of each argument such as ``loss=…`` that does not choose an existing file of its
    folder: null, a number, nothing, or the name of none. Hydra ends with a traceback for the first two
    and silently leaves out an optional file that does not exist. Raises ConfigError for a ``--config-dir``
    that is no folder."""
    folders = [FOLDER, *further_folders(arguments)]
    overrides = ((word, override) for word in arguments if (override := override_in(word)) is not None)
    return {word: error for word, override in overrides if (error := _refusal(override, folders)) is not None}


def _refusal(override: Override, folders: list[Path]) -> ConfigError | None:
    key = override.key_or_group
    if key == "":
        return ConfigError(
            key, override.value(), "has no setting before the =; write it as lr=1e-6, without spaces"
        )
    if override.is_delete() or not any((folder / key).is_dir() for folder in folders):
        return None
    files = sorted({path.stem for folder in folders for path in (folder / key).glob("[!_]*.yaml")})
    for value in _choices(override):
        if not isinstance(value, str) or value == "":
            choose = f"choose a file of config/{key}: {', '.join(files)}"
            return ConfigError(key, "null" if value is None else value, choose)
        if not any(os.path.isfile(folder / key / f"{value}.yaml") for folder in folders):
            return ConfigError(key, value, _if_path(key, value) or no_file(key, value, files))
    return None


def in_quotes(text: str) -> str:
    """Return ``text`` as Hydra reads it back as a text, whatever it looks like."""
    return str(QuotedString(text, Quote.single).with_quotes())


def as_typed(key: str, text: object) -> str:
    """Return ``key=text`` as one argument, in quotes where Hydra would refuse it or read something else."""
    override = override_in(f"{key}={text}")
    same = override is not None and override.value() == str(text)
    return f"{key}={text}" if same else f"{key}={in_quotes(str(text))}"


@cache
def override_in(argument: str) -> Override | None:
    """Return the argument as Hydra parses it, which is not to be changed; None for an option and for an
    argument that Hydra will refuse itself."""
    try:
        return None if argument.startswith("-") else OverridesParser.create().parse_override(argument)
    except HydraException:
        return None


def _choices(override: Override) -> list[object]:
    """Return the file names of an override: one name, a list of names, or those of a sweep. A mapping is not
    a choice but settings."""
    if override.is_sweep_override():
        return list(override.sweep_iterator()) if override.is_choice_sweep() else []
    value = override.value()
    return [] if isinstance(value, dict) else list(value) if isinstance(value, list) else [value]


def further_folders(arguments: Sequence[str]) -> list[Path]:
    """Return the further folders of settings that ``--config-dir`` gives to Hydra. Raises ConfigError."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config-dir", "-cd", type=Path)
    folder = parser.parse_known_args(list(arguments))[0].config_dir
    says = "is no folder; give one with folders such as experiment or loss in it"
    require(folder is None or folder.is_dir(), "--config-dir", folder, says)
    for path in sorted(folder.glob("*/*.yaml")) if folder is not None else ():
        with suppress(OSError, UnicodeDecodeError, YAMLError, RecursionError):  # which Hydra will say
            endless = too_many(path.read_text(encoding="utf-8"))
            require(
                not endless, "--config-dir", path, f"its aliases stand for more than {MOST_VALUES:,} values"
            )
    return [] if folder is None else [folder]


def _if_path(key: str, value: str) -> str | None:
    """Return what to type for ``value``, where it is a file, a folder or a name on the hub, although the name
    of a file of config/ is expected; otherwise None."""
    here = (
        os.path.exists(os.path.expanduser(value))
        or value.startswith((".", "/", "~"))
        or value.endswith((*DATA_FILES, ".py"))
    )
    instead = {
        "data": ("local" if here else "hub", "data.path"),
        "model": ("hub", "model.name_or_path"),
        "reward": ("classifier", "reward.classifier.name_or_path"),
    }.get(key)
    if key == "reward" and value.endswith(".py"):
        instead, value = ("function", "reward.function.path"), f"{value}:NAME_OF_THE_FUNCTION"
    if not here and (instead is None or re.fullmatch(r"[\w.-]+/[\w.-]+", value) is None):
        return None
    typed = f"{key}={Path(value).stem}, with that file in this folder"
    if instead is not None:
        typed = shlex.join([f"{key}={instead[0]}", as_typed(instead[1], value)])
    what = "a path" if here else "a name on the hub"
    return f"is {what}, and {key}= names a file of config/{key}; type {typed}"
