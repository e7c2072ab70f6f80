"""The table of the settings of TRL and HALOs and their names here.

The table is config/elsewhere.yaml. The tables of the guide (docs/from-halos-and-trl.md) are made from it, and
a command line that uses a name of one of these projects is answered from it.
"""

from __future__ import annotations

import re
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
        """Return the row as a remedy for a user who typed ``value``, which takes the place of the example's
        where the row has one way to type it here and units and names of values are the same (``own``)."""
        if not self.here:
            return self.note
        here = ", or ".join(self.here)
        value = value.strip("[]")
        same = self.own and len(self.here) == 1 and "=" not in self.there[0] and here[-1] not in "]'"
        if value and same and "," not in value:
            here = f"{here.rpartition('=')[0]}={value}"
        return f"{here}{f' ({self.note})' if self.note else ''}"


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
    whose = matches[0][0]
    listed = [f'{name}="{part}"' for part in bare.strip("[]").split(",")]
    of_values = [row for by, row in matches if by == whose and row.here]
    of_values = [row for row in of_values if {*listed} & {*row.there}] or of_values
    here = tuple(f"{row.here[0]} for {row.there[0].partition('=')[2]}" for row in of_values)
    return whose, Equivalent((name,), here, own=False)


def guide_table(rows: tuple[Equivalent, ...]) -> str:
    """Return the rows as a markdown table for the guide."""
    lines = ["| there | here |", "|---|---|"]
    for row in rows:
        there = ", ".join(f"`{name}`" for name in row.there)
        here = ", or ".join(f"`{setting}`" for setting in row.here)
        lines.append(f"| {there} | {': '.join(part for part in (here, row.note) if part)} |")
    return "\n".join(lines) + "\n"
