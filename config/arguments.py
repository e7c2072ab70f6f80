"""A command line as people type it: options of other programs' form made settings, and choices of files that
are none refused with what to type."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from common.errors import ConfigError, require
from config.files import FOLDER

HYDRAS = (
    "--help",
    "--hydra-help",
    "--version",
    "--cfg",
    "--resolve",
    "--package",
    "--run",
    "--multirun",
    "--shell-completion",
    "--config-path",
    "--config-name",
    "--config-dir",
    "--experimental-rerun",
    "--info",
)
"""Options that are Hydra's own, which takes them abbreviated too."""
_OPTION = re.compile(r"--(?P<name>[A-Za-z][\w.-]*)(?:=(?P<value>.*))?", re.DOTALL)
_OPEN = re.compile(r"(evaluations|callbacks)[.=]")
"""Settings whose keys are the user's own: Hydra adds one to a mapping only where it is told to."""
_OPTIONAL = ("reward", "trackers")
"""Folders of which none or several files are chosen: of a wrong one Hydra does not say what there is."""
NONE_OF = {
    "reward": "; for none write ~reward",
    "trackers": "; for none write 'trackers=[]'",
    "experiment": "; for none leave it out",
}
"""What to type where no file of a folder is wanted."""
_DATA = (".json", ".jsonl", ".parquet", ".csv", ".gz")


def as_settings(arguments: list[str]) -> list[str]:
    """``--lr 1e-5``, ``--lr=1e-5`` and ``--resume`` as ``lr=1e-5`` and ``resume=true``; a ``-`` within a name
    is a ``_``. Several values are a list. Mappings whose keys are the user's own get Hydra's ``++``. Hydra's
    own options, and everything else, stay as they are."""
    words, at = [], 0
    while at < len(arguments):
        word = arguments[at]
        at += 1
        found = _OPTION.fullmatch(word)
        if found is None or any(own.startswith(word.partition("=")[0]) for own in HYDRAS):
            words.append(word)
            continue
        values = []
        while found["value"] is None and at < len(arguments) and _is_value(arguments[at]):
            values.append(arguments[at])
            at += 1
        value = found["value"] if found["value"] is not None else values[0] if values else "true"
        if len(values) > 1:
            value = f"[{','.join(values)}]"
        words.append(f"{found['name'].replace('-', '_')}={value}")
    return [f"++{word}" if _OPEN.match(word) else word for word in words]


def _is_value(word: str) -> bool:
    """Whether a word after an option is its value: neither another option nor a setting."""
    return "=" not in word and (not word.startswith("-") or re.match(r"-\.?\d", word) is not None)


def choices_of(arguments: list[str]) -> list[str]:
    """Those of the arguments that choose a file of config/."""
    found = [(word, override) for word in arguments if (override := _override(word)) is not None]
    return [
        word
        for word, override in found
        if (FOLDER / override.key_or_group).is_dir() and not override.is_sweep_override()
    ]


def refuse_choices(arguments: list[str]) -> None:
    """Raise ConfigError for a choice among the files of a folder (``loss=…``) that is not one: null, a
    number, nothing, or a reward that is not there. Hydra ends with a traceback at the first two, and leaves
    out an optional file that is not there without a word."""
    folders = [FOLDER, *_folders_given(arguments)]
    for override in filter(None, map(_override, arguments)):
        key = override.key_or_group
        said = "has no setting before the =; write key=value without spaces"
        require(key != "", key, override.value(), said)
        if override.is_delete() or not any((folder / key).is_dir() for folder in folders):
            continue
        files = sorted({path.stem for folder in folders for path in (folder / key).glob("*.yaml")})
        there = ", ".join(name for name in files if not name.startswith("_"))
        none = NONE_OF.get(key, "")
        for value in _choices(override):
            require(
                isinstance(value, str) and value != "",
                key,
                "null" if value is None else value,
                f"choose a file of config/{key}: {there}{none}",
            )
            if not any((folder / key / f"{value}.yaml").is_file() for folder in folders):
                _refuse_path(key, str(value))
            require(
                key not in _OPTIONAL or value in files,
                key,
                value,
                f"there is no such file in config/{key}; there are {there}{none}",
            )


def given_twice(arguments: list[str]) -> list[str]:
    """A sentence for each setting that has two different values: the last one holds, as scripts that append
    to a command count on."""
    values: dict[str, list[str]] = {}
    for override in filter(None, map(_override, arguments)):
        if not override.is_delete() and override.key_or_group:
            values.setdefault(override.key_or_group, []).append(override.get_value_string())
    return [
        f"{key} is given {len(found)} times, {', '.join(found)}: {found[-1]} holds"
        for key, found in values.items()
        if len(set(found)) > 1
    ]


def _override(argument: str) -> Override | None:
    """The argument as Hydra reads it; None for an option, and for what Hydra will refuse itself."""
    try:
        return None if argument.startswith("-") else OverridesParser.create().parse_override(argument)
    except HydraException:
        return None


def _choices(override: Override) -> list[object]:
    """The file names of an override: one, a list of them, or those of a sweep. A mapping is no choice but
    settings."""
    if override.is_sweep_override():
        return list(override.sweep_iterator()) if override.is_choice_sweep() else []
    value = override.value()
    return [] if isinstance(value, dict) else list(value) if isinstance(value, list) else [value]


def _folders_given(arguments: list[str]) -> list[Path]:
    """Further folders of settings, which Hydra takes as --config-dir."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config-dir", "-cd", type=Path)
    given = parser.parse_known_args(arguments)[0].config_dir
    return [] if given is None else [given]


def _refuse_path(key: str, value: str) -> None:
    """Raise ConfigError for what is a file, a folder or a name on the hub where the name of a file of config/
    is asked for."""
    here = Path(value).expanduser().exists() or value.startswith((".", "/", "~")) or value.endswith(_DATA)
    on_hub = re.fullmatch(r"[\w.-]+/[\w.-]+", value) is not None
    if not here and not on_hub:
        return
    what = "a path" if here else "a name on the hub"
    type_instead = {
        "data": f"data={'local' if here else 'hub'} data.path={value}",
        "model": f"model=hub model.name_or_path={value}",
        "reward": f"reward=classifier reward.classifier.name_or_path={value}",
    }.get(key)
    if type_instead is not None:
        raise ConfigError(
            key, value, f"is {what}, and {key}= names a file of config/{key}; type {type_instead}"
        )
