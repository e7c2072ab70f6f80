"""Conversion of groups into tokenised examples by a view and the renderer. Groups that cannot be trained on
are counted and named."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from data.chat import Renderer
from data.example_table import ExampleGroups, ExampleTable, Wanted, sizes_of, with_tokens
from data.token_cache import TokenCache
from data.token_rows import Rendered, TokenRows
from data.types import Group
from data.views import View

SAYS_NOTHING = "its rewards say nothing (too few completions, or all equal)"


_MADE_EQUAL = "its two answers are the same once cut to model.max_length"


@dataclass(frozen=True)
class Examples:
    """The examples of each group that has any, and why the other groups have none."""

    groups: ExampleGroups
    dropped: dict[str, int]
    """reason -> number of groups"""

    @property
    def count(self) -> int:
        return int(sizes_of(self.groups).sum())


def make_examples(
    groups: Iterable[Group], view: View, renderer: Renderer, cache: TokenCache | None = None
) -> Examples:
    """Tokenise the rows that ``view`` selects from each group, or read from ``cache`` the result of an
    earlier start on the same rows. If any selected row of a group cannot be tokenised (no completion token
    left), the whole group is dropped, so that every loss drops the same groups."""
    wanted = Wanted(groups if isinstance(groups, Seq) else list(groups), view)
    rows = renderer.sequences(wanted) if cache is None else cache.sequences(renderer, wanted)
    if not isinstance(rows, TokenRows):
        rows = [with_tokens(row, completion) for row, (_, completion) in zip(rows, wanted, strict=True)]
    why = _reasons(wanted, rows)
    dropped: dict[str, int] = {}
    first: dict[str, str] = {}
    for group in sorted(why):
        reason = why[group]
        if "chat template" in reason:  # what it refuses is seen in the row
            place = first.get(reason) or wanted.groups[group].place
            first[reason] = place
            reason += f" (first: {place})" if place else ""
        dropped[reason] = dropped.get(reason, 0) + 1
    kept = np.setdiff1d(np.arange(len(wanted.ends)), np.array(list(why), np.int64))
    table = ExampleTable(wanted, rows, kept)
    if not isinstance(rows, TokenRows):
        return Examples(tuple(table), dropped)  # few rows: kept, and not made again for every batch
    if not wanted.flags.any():
        wanted.groups = ()  # they are not read again
    return Examples(table, dropped)


def _reasons(wanted: Wanted, rows: Rendered) -> dict[int, str]:
    """Return for each group without an example the reason: the first of its rows that cannot be trained on,
    or that the view selects nothing of it."""
    if isinstance(rows, TokenRows):
        look_at = np.flatnonzero((rows.sizes < 0) | (wanted.flags > 0)).tolist()
    else:
        look_at = [r for r, row in enumerate(rows) if isinstance(row, str)]
    why = {int(group): SAYS_NOTHING for group in np.flatnonzero(wanted.first_rows == wanted.last_rows)}
    why |= dict.fromkeys(_made_equal(wanted, rows), _MADE_EQUAL)
    for place in look_at:
        row = rows[place]
        if wanted.flags[place] and isinstance(rows, TokenRows):
            row = with_tokens(row, wanted.completion(place))
        if isinstance(row, str):
            why.setdefault(wanted.group(place), row)
    return why


def _made_equal(wanted: Wanted, rows: Rendered) -> Iterator[int]:
    """Yield the groups whose two rows are the same although their texts differ: they carry no preference."""
    pairs = np.flatnonzero(wanted.last_rows - wanted.first_rows == 2)
    if isinstance(rows, TokenRows):
        sizes = rows.sizes[wanted.first_rows[pairs]], rows.sizes[wanted.first_rows[pairs] + 1]
        pairs = pairs[(sizes[0] == sizes[1]) & (sizes[0] >= 0)]
    for group in pairs.tolist():
        at = int(wanted.first_rows[group])
        one, other = rows[at], rows[at + 1]
        if isinstance(one, str) or isinstance(other, str):
            continue
        if np.array_equal(one.completion_ids, other.completion_ids):
            texts = {wanted.completion(row).text for row in (at, at + 1)}
            if len(texts) == 2 and None not in texts:
                yield group
