"""Which rows of a microbatch leave their prompt to another row that has the same one, so that it is computed
once: the samples of a group, the two answers of a pair."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from data.types import Sequence


def prompt_owners(rows: Seq[Sequence]) -> list[int]:
    """For each row the first one with the same prompt tokens, which may be itself. A row that fills a batch
    up, without a completion, shares nothing: nothing of it would be left."""
    first: dict[bytes, int] = {}
    return [
        first.setdefault(row.prompt_ids.tobytes(), r) if len(row.completion_ids) else r
        for r, row in enumerate(rows)
    ]


def own_tokens(rows: Seq[Sequence]) -> list[int]:
    """How many tokens are computed for each row where prompts are shared: at least 1."""
    owners = prompt_owners(rows)
    return [
        max(len(row), 1) if owner == r else len(row.completion_ids)
        for r, (row, owner) in enumerate(zip(rows, owners, strict=True))
    ]
