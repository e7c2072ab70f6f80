"""The table of the settings of TRL and HALOs and their names here.

The table is config/elsewhere.yaml. The tables of the guide (docs/from-halos-and-trl.md) are made from it, and
a command line that uses a name of one of these projects is answered from it.
"""

from __future__ import annotations

import os
import re
import shlex
from functools import cache
from itertools import starmap
from typing import Any, NamedTuple

from config.files import section

PROJECTS = ("TRL", "HALOs")


class Equivalent(NamedTuple):
    """Settings of the other project, and the settings here that say the same."""

    there: tuple[str, ...]
    """As one types them in the other project; with a value if the row is about that value alone"""
    here: tuple[str, ...]
    """As one types it here; several are alternatives. Empty: there is no such setting."""
    note: str = ""
    """What else to know; if ``here`` is empty, what happens instead"""
    own: bool = True
    """Whether the value that was typed there is the one to type here"""
    same: bool = False
    """Whether the names are the same here, so that no message is needed"""

    @property
    def names(self) -> list[str]:
        """The settings' names without values."""
        return [name.partition("=")[0] for name in self.there]

    def answer(self, value: str) -> str:
        """Return the row as a remedy for a user who typed ``value``. A single setting without a note has the
        same values in both projects, so the remedy repeats the value."""
        if not self.here:
            return self.note
        typed = self.typed(value)
        here = shlex.join(typed) if typed and value else ", or ".join(self.here)
        return f"{here}{f' ({self.note})' if self.note else ''}"

    def typed(self, value: str) -> list[str]:
        """Return the words to type here for ``value``, which has the place of the example's; nothing where
        units or names of values differ (``own``) or the choice is the user's."""
        if not self.here or (not self.own and not any("=" in name for name in self.there)):
            return []
        local = value.endswith((".json", ".jsonl", ".csv", ".parquet", ".gz")) or os.path.exists(value)
        fitting = [way for way in self.here if "=local" in way] if local else []
        value = value.strip("[]") if "," not in value else value
        *words, last = shlex.split((fitting or self.here)[0])
        key, _, example = last.partition("=")
        keeps = not self.own or "," in value or not value or any("=" in name for name in self.there)
        if example.startswith("[") and not keeps:  # a list there too
            value = f"[{value}]" if re.fullmatch(r"[\w.-]+", value) else f'["{value}"]'
        return [*words, f"{key}={example if keeps else value}"]


@cache
def sources() -> dict[str, tuple[Equivalent, ...]]:
    """Return project -> its rows in config/elsewhere.yaml, which is read once a key is unknown."""
    return {whose: tuple(starmap(_row, section(f"elsewhere.yaml:{whose}").items())) for whose in PROJECTS}


def _row(there: str, said: Any) -> Equivalent:
    said = said if isinstance(said, dict) else {"here": said}
    here = (part.strip() for part in said.get("here", "").split("|") if part)
    return Equivalent(tuple(there.split()), **said | {"here": tuple(here)})


def known_elsewhere(name: str, value: str) -> tuple[str, Equivalent] | None:
    """Return (the project, its row) for the name of a setting in another project; None if neither project has
    it.

    If a name has several rows, one for each value, return the row of ``value``; otherwise return all of them
    as one.
    """
    rows = ((whose, row) for whose, rows in sources().items() for row in rows if not row.same)
    matches = [(whose, row) for whose, row in rows if name in row.names]
    if not matches:
        return known_elsewhere(name[3:], "false") if name.startswith("no_") else None
    bare = re.sub(r"[\"' ]", "", value)  # as a shell would strip them
    asked = [(whose, row) for whose, row in matches if f'{name}="{bare}"' in row.there]
    if asked or len(matches) == 1 or name in matches[0][1].there:
        return (asked or matches)[0]
    whose, parts = matches[0][0], bare.strip("[]").split(",")
    if several := [at for part in parts for at in matches if f'{name}="{part}"' in at[1].there]:
        matches = several
    here = tuple(
        f"{row.here[0]} for {row.there[0].partition('=')[2]}"
        for by, row in matches
        if by == whose and row.here
    )
    note = "several are not summed here" if len(several) > 1 else ""
    return whose, Equivalent((name,), here, note, own=False)


def guide_table(rows: tuple[Equivalent, ...]) -> str:
    """Return the rows as a markdown table for the guide."""
    lines = ["| there | here |", "|---|---|"]
    for row in rows:
        there = ", ".join(f"`{name}`" for name in row.there)
        here = ", or ".join(f"`{setting}`" for setting in row.here)
        lines.append(f"| {there} | {': '.join(part for part in (here, row.note) if part)} |")
    return "\n".join(lines) + "\n"
