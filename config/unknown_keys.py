"""Messages for a key that is not a setting: its place here, the name here of another project's setting, or
the setting that was probably meant. A misspelt key gets a suggestion only if a setting is spelt almost the
same."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, get_type_hints

from common.secrets import is_secret
from config.elsewhere import Equivalent, known_elsewhere
from config.files import FOLDER, section
from config.removed import why_removed

MOST_NAMED = 4
"""Most settings with the same last name that a message lists. A longer list would not help."""
NEAR = 0.8
"""Similarity (difflib) from which a name counts as misspelt."""
SECTIONS = ("model", "loss", "data", "trainer", "rounds", "sampler", "reward")
NOTHING = "is not a setting, nothing would read it"


def remedy(key: str, value: str, known: Iterable[str]) -> str:
    """Return the message about ``key``, which is not among ``known``, the dotted names of all settings.

    The first of these that applies gives the message: a dotted name of another project's; the rewards that
    have such a section; the settings here that end in the same name; the losses that have such a number;
    another project's name; a setting that is spelt almost the same; the settings of the section that has this
    name or that contains the key.
    """
    known = list(known)
    sections = {name.rpartition(".")[0] for name in known} - {""}
    value = "" if is_secret(key, value) else value
    last = key.rpartition(".")[2]
    same = [name for name in sorted(known, key=_section) if name.rpartition(".")[2] == last]
    meant = [name for name in same if name in sections]
    same = [name for name in same if name not in sections]
    if last != key and (foreign_setting := known_elsewhere(key, value)):
        return _of(*foreign_setting, value)
    if rewards := _rewards_with(key, known):
        return f"{NOTHING} unless {' or '.join(rewards)} is chosen"
    if 0 < len(same) <= MOST_NAMED:
        return f"{NOTHING}; here it is {' or '.join(f'{name}={value}' if value else name for name in same)}"
    if losses := _losses_with(last):
        return f"{NOTHING}; loss.{last} is a setting of loss={', '.join(losses)}"
    if foreign_setting := known_elsewhere(last, value):
        return _of(*foreign_setting, value)
    if dotted := [name for name in known if name.replace(".", "_") == key]:
        return f"{NOTHING}; here it is {dotted[0]}{f'={value}' if value else ''}"
    head = key.rpartition(".")[0]
    beside = [name for name in known if name.rpartition(".")[0] == head] if head in sections else known
    near = nearest(key, [name for name in beside if last == key or name not in sections])
    if near is not None and not meant:
        return f"{NOTHING}; did you mean {near}?"
    inside = next((name for name in (*meant, head) if name in sections), None)
    return f"{NOTHING}; {section_says(inside, known)}" if inside is not None else NOTHING


def section_says(name: str, known: Iterable[str]) -> str:
    """Return the end of a sentence that lists the settings of section ``name``; ``known`` are the dotted
    names of all settings."""
    own = [key.removeprefix(f"{name}.") for key in known if key.startswith(f"{name}.")]
    own = sorted(key for key in own if "." not in key and not key.startswith("_"))
    return f"the settings of {name} are {', '.join(own)}"


def _section(name: str) -> int:
    """Return the rank of a setting in a list: settings that every run reads come before those that only
    online rounds read."""
    first = name.partition(".")[0]
    return SECTIONS.index(first) if first in SECTIONS else len(SECTIONS)


def _of(whose: str, row: Equivalent, value: str) -> str:
    said = row.answer(value).replace("`", "")
    whose = f"{whose}'" if whose.endswith("s") else f"{whose}'s"
    return f"is {whose} name, nothing here would read it; {'here: ' if row.here else ''}{said}"


def no_file(folder: str, name: str, there: list[str]) -> str:
    """Return the message about a choice that no file of config/``folder`` has; the files are ``there``."""
    if (gone := why_removed(folder, name)) is not None:
        return gone
    lowered = {option.lower(): option for option in there}
    near = difflib.get_close_matches(name.lower(), lowered, 1, NEAR)
    said = f"there is no such file in config/{folder}; "
    if near:
        return f"{said}did you mean {folder}={lowered[near[0]]}?"
    if (
        folder == "loss"
        and (foreign_setting := known_elsewhere("loss_type", name))
        and len(foreign_setting[1].there) == 1
    ):
        row = foreign_setting[1]
        if f'loss_type="{name}"' in row.there:
            return f"{said}in TRL it is a loss_type; {'here: ' if row.here else ''}{row.answer(name)}"
    return f"{said}there are {', '.join(there)}{OTHERS.get(folder, '')}"


OTHERS = {
    "model": "; any other model is model=hub model.name_or_path=org/name, or a folder in its place",
    "data": "; any other set is data=hub data.path=org/name, or data=local data.path=FILE",
}
"""What to choose for what has no file of its own."""


def nearest(key: str, known: Iterable[str]) -> str | None:
    """Return the setting whose last name is spelt almost like that of ``key``, in capitals or not; settings
    of the same section take precedence. Return None if there is none."""
    head, _, last = key.rpartition(".")
    scored = [
        (
            difflib.SequenceMatcher(None, last.lower(), name.rpartition(".")[2].lower()).ratio(),
            name.rpartition(".")[0] == head,
            name,
        )
        for name in known
    ]
    close = [candidate for candidate in scored if candidate[0] >= NEAR]
    return max(close, key=lambda candidate: (candidate[1], candidate[0]))[2] if close else None


def _losses_with(number: str) -> list[str]:
    """Return the losses whose file has this key in its own section."""
    files = sorted((FOLDER / "loss").glob("*.yaml"))
    return [path.stem for path in files if number in section(f"loss/{path.name}:loss")]


def _rewards_with(key: str, known: Iterable[str]) -> list[str]:
    """Return the choices to type for the rewards that have the section of ``key``, which the chosen reward
    does not have."""
    group, kind, *_ = [*key.split("."), ""]
    if group != "reward" or kind == "" or f"reward.{kind}" in known:
        return []
    files = sorted((FOLDER / "reward").glob("*.yaml"))
    return [f"reward={path.stem}" for path in files if kind in section(f"reward/{path.name}")]


@cache
def type_hints(schema: type, extras: bool = False) -> dict[str, Any]:
    """Return field -> type of a dataclass, with its annotations if ``extras``, not to be changed."""
    return get_type_hints(schema, include_extras=extras)


def names(schema: type, prefix: str = "") -> Iterator[str]:
    """Yield every dotted setting of a dataclass."""
    hints = type_hints(schema)
    for item in fields(schema):
        yield prefix + item.name
        if is_dataclass(hints[item.name]):
            yield from names(hints[item.name], f"{prefix}{item.name}.")


def names_of(tree: object, prefix: str = "") -> Iterator[str]:
    """Yield every dotted key of composed settings."""
    if isinstance(tree, dict):
        for key, item in tree.items():
            yield f"{prefix}{key}"
            yield from names_of(item, f"{prefix}{key}.")
