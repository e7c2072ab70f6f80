"""Messages for a key that is not a setting: its place here, the name here of another project's setting, or
the setting that was probably meant. A misspelt key gets a suggestion only if a setting is spelt almost the
same.

The names of TRL and HALOs are those of config/foreign_names.yaml, from which the tables of the guide
(docs/from-halos-and-trl.md) are made too.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from functools import cache
from itertools import starmap
from typing import Any, NamedTuple, get_type_hints

from common.markdown import table
from common.secrets import is_secret
from config.files import FOLDER, section
from config.removed import why_removed

MOST_NAMED = 4
"""Most settings with the same last name of which a message names the first. Of more, none is meant."""
NEAR = 0.8
"""Similarity (difflib) from which a name counts as misspelt."""
SECTIONS = ("model", "loss", "data", "trainer", "rounds", "sampler", "reward")
"""Sections in the order in which a message lists settings; those that online rounds alone read come last."""
NOTHING = "is not a setting, nothing would read it"
PROJECTS = ("TRL", "HALOs")


class Equivalent(NamedTuple):
    """Settings of the other project, and the settings here that say the same."""

    there: tuple[str, ...]
    """As one types them in the other project; with a value if the row is about that value alone"""
    here: tuple[str, ...]
    """As one types it here; several are alternatives. Empty: there is no such setting."""
    note: str = ""
    """What else to know; if ``here`` is empty, what happens instead"""
    same: bool = False
    """Whether the names are the same here, so that no message is needed"""

    @property
    def names(self) -> list[str]:
        """The settings' names without values."""
        return [name.partition("=")[0] for name in self.there]

    @property
    def answer(self) -> str:
        """The row as a remedy. What is to be typed here is an example, unless the row is about a value."""
        if not self.here:
            return self.note.replace("`", "")
        example = "" if "=" in self.there[0] or "=" not in self.here[0] else ", for example"
        note = f" ({self.note})" if self.note else ""
        return f"here{example}: {', or '.join(self.here)}{note}".replace("`", "")


@cache
def sources() -> dict[str, tuple[Equivalent, ...]]:
    """Return project -> its rows in config/foreign_names.yaml, which is read once a key is unknown."""
    return {whose: tuple(starmap(_row, section(f"foreign_names.yaml:{whose}").items())) for whose in PROJECTS}


def _row(there: str, content: Any) -> Equivalent:
    content = content if isinstance(content, dict) else {"here": content}
    here = (part.strip() for part in content.get("here", "").split("|") if part)
    return Equivalent(tuple(there.split()), **content | {"here": tuple(here)})


def foreign(name: str, value: str) -> tuple[str, Equivalent] | None:
    """Return (the project, its row) for the name of a setting in another project; None if neither project has
    it. Of several rows, one for each value, it is the row of ``value``, or all of them as one."""
    rows = [(whose, row) for whose in PROJECTS for row in sources()[whose] if name in row.names]
    rows = [(whose, row) for whose, row in rows if not row.same]
    if not rows:
        return foreign(name[3:], "false") if name.startswith("no_") else None
    bare = re.sub(r"[\"' ]", "", value)  # as a shell would strip them
    typed = f"{name}={bare}".lower()
    exact = [
        (whose, row) for whose, row in rows if typed in (one.replace('"', "").lower() for one in row.there)
    ]
    if exact or len(rows) == 1 or name in rows[0][1].there:
        return (exact or rows)[0]
    of_values = [row for whose, row in rows if whose == rows[0][0] and row.here]
    here = tuple(f"{row.here[0]} for {row.there[0].partition('=')[2]}" for row in of_values)
    return rows[0][0], Equivalent((name,), here)


def remedy(key: str, value: str, settings: Iterable[str]) -> str:
    """Return the message about ``key``, which is not among ``settings``, the dotted names of all of them.

    The first of these that applies gives the message: a dotted name of another project's; the rewards that
    have such a section; the settings here that end in the same name; the losses that have such a number;
    another project's name; a setting that is spelt almost the same; the settings of the section that has this
    name or that contains the key.
    """
    settings = sorted(settings, key=_rank)
    sections = {name.rpartition(".")[0] for name in settings} - {""}
    head, _, last = key.rpartition(".")
    value = "" if is_secret(key, value) else value
    same = [name for name in settings if name.rpartition(".")[2] == last]
    here = [name for name in same if name not in sections]
    row = foreign(key, value) if head else None
    if row is None and (rewards := _rewards_with(key, settings)):
        return f"{NOTHING} unless {' or '.join(rewards)} is chosen"
    if row is None and 0 < len(here) <= MOST_NAMED:
        return f"{NOTHING}; here it is {here[0]}{f'={value}' if value else ''}"
    if row is None and (losses := _losses_with(last)):
        return f"{NOTHING}; loss.{last} is a setting of loss={', '.join(losses)}"
    if row := row or foreign(last, value):
        whose = f"{row[0]}'" if row[0].endswith("s") else f"{row[0]}'s"
        return f"is {whose} name, nothing here would read it; {row[1].answer}"
    if dotted := [name for name in settings if name.replace(".", "_") == key]:
        return f"{NOTHING}; here it is {dotted[0]}{f'={value}' if value else ''}"
    meant = [name for name in same if name in sections]
    return _nearest_or_section(key, meant, settings, sections)


def _nearest_or_section(key: str, meant: list[str], settings: list[str], sections: set[str]) -> str:
    """Return the message with the setting that is spelt almost as ``key``, or what is in its section.
    ``meant``: sections of the key's last name."""
    head = key.rpartition(".")[0]
    beside = [name for name in settings if head not in sections or name.rpartition(".")[0] == head]
    near = nearest(key, [name for name in beside if not head or name not in sections])
    if near is not None and not meant:
        return f"{NOTHING}; did you mean {near}?"
    inside = next((name for name in (*meant, head) if name in sections), None)
    return f"{NOTHING}; {section_says(inside, settings)}" if inside is not None else NOTHING


def section_says(name: str, settings: Iterable[str]) -> str:
    """Return the end of a sentence that lists the settings of section ``name``; ``settings`` are the dotted
    names of all of them."""
    inside = [key.removeprefix(f"{name}.") for key in settings if key.startswith(f"{name}.")]
    inside = sorted(key for key in inside if "." not in key and not key.startswith("_"))
    return f"the settings of {name} are {', '.join(inside)}"


def _rank(name: str) -> int:
    first = name.partition(".")[0]
    return SECTIONS.index(first) if first in SECTIONS else len(SECTIONS)


OTHERS = {
    "model": "; any other model is model=hub model.name_or_path=org/name, or a folder in its place",
    "data": "; any other set is data=hub data.path=org/name, or data=local data.path=FILE",
}
"""What to choose for what has no file of its own."""


def no_file(folder: str, name: str, there: list[str]) -> str:
    """Return the message about a choice that no file of config/``folder`` has; the files are ``there``."""
    if (gone := why_removed(folder, name)) is not None:
        return gone
    missing = f"there is no such file in config/{folder}; "
    lowered = {file.lower(): file for file in there}
    if near := difflib.get_close_matches(name.lower(), lowered, 1, NEAR):
        return f"{missing}did you mean {folder}={lowered[near[0]]}?"
    row = foreign("loss_type", name) if folder == "loss" else None
    if row is not None and f'loss_type="{name}"' in row[1].there:
        return f"{missing}in TRL it is a loss_type; {row[1].answer}"
    return f"{missing}there are {', '.join(there)}{OTHERS.get(folder, '')}"


def nearest(key: str, settings: Iterable[str]) -> str | None:
    """Return the setting whose last name is spelt almost like that of ``key``, in capitals or not; settings
    of the same section take precedence. Return None if there is none."""
    head, _, last = key.rpartition(".")
    settings = list(settings)
    for names in ([name for name in settings if name.rpartition(".")[0] == head], settings):
        by_last = {name.rpartition(".")[2].lower(): name for name in reversed(names)}
        if close := difflib.get_close_matches(last.lower(), by_last, 1, NEAR):
            return by_last[close[0]]
    return None


def _losses_with(number: str) -> list[str]:
    """Return the losses whose file has this key in its own section."""
    files = sorted((FOLDER / "loss").glob("*.yaml"))
    return [path.stem for path in files if number in section(f"loss/{path.name}:loss")]


def _rewards_with(key: str, settings: Iterable[str]) -> list[str]:
    """Return the choices to type for the rewards that have the section of ``key``, which the chosen reward
    does not have."""
    group, kind, *_ = [*key.split("."), ""]
    if group != "reward" or kind == "" or f"reward.{kind}" in settings:
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


def guide_table(rows: tuple[Equivalent, ...]) -> str:
    """Return the rows as a markdown table for the guide."""
    lines = []
    for row in rows:
        there = ", ".join(f"`{name}`" for name in row.there)
        here = ", or ".join(f"`{setting}`" for setting in row.here)
        lines.append((there, ": ".join(part for part in (here, row.note) if part)))
    return table(("there", "here"), lines) + "\n"
