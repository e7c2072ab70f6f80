"""Sharing of prompts among the rows of a microbatch, so that a prompt of several rows (the samples of a
group, the two answers of a pair) is computed once."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from data.types import Sequence


def prompt_owners(rows: Seq[Sequence]) -> list[int]:
    """Return for each row the index of the first row with the same prompt tokens, which may be the row
    itself. A row without a completion, which only fills a batch up, shares nothing, because nothing of it
    would be left."""
    first: dict[bytes, int] = {}
    return [
        first.setdefault(row.prompt_ids.tobytes(), r) if len(row.completion_ids) else r
        for r, row in enumerate(rows)
    ]


def own_tokens(rows: Seq[Sequence]) -> list[int]:
    """Return the number of tokens that are computed for each row if prompts are shared: at least 1."""
    owners = prompt_owners(rows)
    return [
        max(len(row), 1) if owner == r else len(row.completion_ids)
        for r, (row, owner) in enumerate(zip(rows, owners, strict=True))
    ]
