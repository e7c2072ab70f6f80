"""Groups, through a view and the renderer, into tokenised examples. What cannot be trained on is counted and
named."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from data.chat import Renderer
from data.example_table import ExampleGroups, ExampleTable, Wanted, sizes_of, with_tokens
from data.token_cache import TokenCache
from data.token_rows import Rendered, TokenRows
from data.types import Group
from data.views import View

_SAYS_NOTHING = "its rewards say nothing (too few completions, or all equal)"


@dataclass(frozen=True)
class Examples:
    """The examples of each group that gave any, and why the others gave none."""

    groups: ExampleGroups
    dropped: dict[str, int]
    """reason -> number of groups"""

    @property
    def count(self) -> int:
        return int(sizes_of(self.groups).sum())


def make_examples(
    groups: Iterable[Group], view: View, renderer: Renderer, cache: TokenCache | None = None
) -> Examples:
    """Tokenise what ``view`` wants of each group, or read from ``cache`` what an earlier start made of the
    same rows. A group of which any wanted row cannot be tokenised (no completion token left) is dropped
    whole, so that every loss drops the same groups."""
    wanted = Wanted(groups if isinstance(groups, Seq) else list(groups), view)
    rows = renderer.sequences(wanted) if cache is None else cache.sequences(renderer, wanted)
    if not isinstance(rows, TokenRows):
        rows = [with_tokens(row, completion) for row, (_, completion) in zip(rows, wanted, strict=True)]
    why = _reasons(wanted, rows)
    dropped: dict[str, int] = {}
    for group in sorted(why):
        dropped[why[group]] = dropped.get(why[group], 0) + 1
    kept = np.setdiff1d(np.arange(len(wanted.ends)), np.array(list(why), np.int64))
    table = ExampleTable(wanted, rows, kept)
    if not isinstance(rows, TokenRows):
        return Examples(tuple(table), dropped)  # few: held, and not made again for every batch
    if not wanted.flags.any():
        wanted.groups = ()  # nothing is read from them any more
    return Examples(table, dropped)


def _reasons(wanted: Wanted, rows: Rendered) -> dict[int, str]:
    """Why a group gives no example, of those that give none: the first of its rows that cannot be trained
    on, or that nothing of it is wanted."""
    if isinstance(rows, TokenRows):
        look_at = np.flatnonzero((rows.sizes < 0) | (wanted.flags > 0)).tolist()
    else:
        look_at = [r for r, row in enumerate(rows) if isinstance(row, str)]
    why = {int(group): _SAYS_NOTHING for group in np.flatnonzero(wanted.first_rows == wanted.last_rows)}
    for place in look_at:
        row = rows[place]
        if wanted.flags[place] and isinstance(rows, TokenRows):
            row = with_tokens(row, wanted.completion(place))
        if isinstance(row, str):
            why.setdefault(wanted.group(place), row)
    return why
