"""What is said of a setting that is none: where its name stands here, what another project's name is called
here, or which setting was probably meant. Nothing is guessed from afar."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from typing import get_type_hints

from common.secrets import is_secret
from config.defaults import section
from config.elsewhere import Row, known_elsewhere
from config.files import FOLDER

MOST_NAMED = 4
"""Settings of one last name that are listed; more of them say nothing."""
NEAR = 0.8
"""Likeness (difflib) from which on a name counts as misspelt."""
SECTIONS = ("model", "loss", "data", "trainer", "rounds", "sampler", "reward")
NOTHING = "is not a setting, nothing would read it"


def remedy(key: str, value: str, known: Iterable[str]) -> str:
    """What to say of ``key``, which none of the dotted settings ``known`` is.

    In this order: a dotted name of another project's; the rewards that have such a section; the settings here
    that end in the same name; the losses that have such a number; another project's name; a setting that is
    spelt almost so; the settings of the section that has this name, or that the name stands in.
    """
    known = list(known)
    sections = {name.rpartition(".")[0] for name in known} - {""}
    value = "" if is_secret(key, value) else value
    last = key.rpartition(".")[2]
    same = [name for name in sorted(known, key=_section) if name.rpartition(".")[2] == last]
    meant = [name for name in same if name in sections]
    same = [name for name in same if name not in sections]
    if last != key and (found := known_elsewhere(key, value)):
        return _of(*found, value)
    if rewards := _rewards_with(key, known):
        return f"{NOTHING} unless {' or '.join(rewards)} is chosen"
    if 0 < len(same) <= MOST_NAMED:
        return f"{NOTHING}; here it is {' or '.join(f'{name}={value}' if value else name for name in same)}"
    if losses := _losses_with(last):
        return f"{NOTHING}; loss.{last} is a setting of loss={', '.join(losses)}"
    if found := known_elsewhere(last, value):
        return _of(*found, value)
    head = key.rpartition(".")[0]
    beside = [name for name in known if name.rpartition(".")[0] == head] if head in sections else known
    near = nearest(key, [name for name in beside if last == key or name not in sections])
    if near is not None and not meant:
        return f"{NOTHING}; did you mean {near}?"
    inside = next((name for name in (*meant, head) if name in sections), None)
    return f"{NOTHING}; {section_says(inside, known)}" if inside is not None else NOTHING


def section_says(name: str, known: Iterable[str]) -> str:
    """The settings of a section, by their dotted names ``known``, as the end of a sentence."""
    own = [key.removeprefix(f"{name}.") for key in known if key.startswith(f"{name}.")]
    own = sorted(key for key in own if "." not in key and not key.startswith("_"))
    return f"the settings of {name} are {', '.join(own)}"


def _section(name: str) -> int:
    """Where a setting comes in a list: what every run reads comes before what rounds alone read."""
    first = name.partition(".")[0]
    return SECTIONS.index(first) if first in SECTIONS else len(SECTIONS)


def _of(whose: str, row: Row, value: str) -> str:
    said = row.answer(value).replace("`", "")
    whose = f"{whose}'" if whose.endswith("s") else f"{whose}'s"
    return f"is {whose} name, nothing here would read it; {'here: ' if row.here else ''}{said}"


def nearest(key: str, known: Iterable[str]) -> str | None:
    """The setting whose last name is spelt almost as that of ``key``, one of the same section first; None
    where none is."""
    head, _, last = key.rpartition(".")
    scored = [
        (
            difflib.SequenceMatcher(None, last, name.rpartition(".")[2]).ratio(),
            name.rpartition(".")[0] == head,
            name,
        )
        for name in known
    ]
    close = [found for found in scored if found[0] >= NEAR]
    return max(close, key=lambda found: (found[1], found[0]))[2] if close else None


def _losses_with(number: str) -> list[str]:
    """The losses whose file has this key of its own."""
    files = sorted((FOLDER / "loss").glob("*.yaml"))
    return [path.stem for path in files if number in section(f"loss/{path.name}:loss")]


def _rewards_with(key: str, known: Iterable[str]) -> list[str]:
    """What to type for the rewards that have the section which ``key`` is in, where another or none is
    chosen."""
    of, kind, *_ = [*key.split("."), ""]
    if of != "reward" or kind == "" or f"reward.{kind}" in known:
        return []
    files = sorted((FOLDER / "reward").glob("*.yaml"))
    return [f"reward={path.stem}" for path in files if kind in section(f"reward/{path.name}")]


def names(schema: type, prefix: str = "") -> Iterator[str]:
    """Every dotted setting of a dataclass."""
    hints = get_type_hints(schema)
    for item in fields(schema):
        yield prefix + item.name
        if is_dataclass(hints[item.name]):
            yield from names(hints[item.name], f"{prefix}{item.name}.")


def names_of(tree: object, prefix: str = "") -> Iterator[str]:
    """Every dotted key of composed settings."""
    if isinstance(tree, dict):
        for key, item in tree.items():
            yield f"{prefix}{key}"
            yield from names_of(item, f"{prefix}{key}.")
