"""Groups, through a view and the renderer, into tokenised examples. What cannot be trained on is counted and
named."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from data.chat import Renderer
from data.token_cache import TokenCache
from data.types import Completion, Example, Group, Sequence
from data.views import View


@dataclass(frozen=True)
class Examples:
    """The examples of each group that gave any, and why the others gave none."""

    groups: tuple[tuple[Example, ...], ...]
    dropped: dict[str, int]
    """reason -> number of groups"""

    @property
    def count(self) -> int:
        return sum(len(group) for group in self.groups)


def with_behavior(row: Sequence | str, completion: Completion) -> Sequence | str:
    """The row with the log-probabilities that its writer gave its tokens. They are not known of an end token
    that the row got here."""
    if completion.behavior_logprobs is None or isinstance(row, str):
        return row
    known = completion.behavior_logprobs[: len(row.completion_ids)]
    found = np.full(len(row.completion_ids), np.nan, np.float32)
    found[: len(known)] = known
    return replace(row, behavior_logprobs=found)


def with_tokens(row: Sequence | str, completion: Completion) -> Sequence | str:
    """The row with what is known of each of its tokens: log mu, whether it counts, its reward; or the reason
    why it cannot be trained on. An end token that the row got here counts, and is worth 0."""
    row = with_behavior(row, completion)
    if isinstance(row, str):
        return row
    size = len(row.completion_ids)
    if completion.token_rewards is not None:
        rewards = np.zeros(size, np.float32)
        rewards[: len(completion.token_rewards)] = completion.token_rewards[:size]
        row = replace(row, token_rewards=rewards)
    if completion.loss_mask is not None and not all(completion.loss_mask):
        mask = np.ones(size, bool)
        mask[: len(completion.loss_mask)] = completion.loss_mask[:size]
        row = replace(row, loss_mask=mask) if mask.any() else "its loss_mask leaves no token to train on"
    return row


def make_examples(
    groups: Iterable[Group], view: View, renderer: Renderer, cache: TokenCache | None = None
) -> Examples:
    """Tokenise what ``view`` wants of each group, or read from ``cache`` what an earlier start made of the
    same rows. A group of which any wanted row cannot be tokenised (no completion token left) is dropped
    whole, so that every loss drops the same groups."""
    groups = list(groups)
    wanted = [view(group) for group in groups]
    rows = [
        (g.prompt, g.completions[i])
        for g, ws in zip(groups, wanted, strict=True)
        for w in ws
        for i in w.completions
    ]
    rendered = iter(renderer.sequences(rows) if cache is None else cache.sequences(renderer, rows))
    kept: list[tuple[Example, ...]] = []
    dropped: dict[str, int] = {}
    for group, wants in zip(groups, wanted, strict=True):
        made = [
            (want, [with_tokens(next(rendered), group.completions[i]) for i in want.completions])
            for want in wants
        ]
        failed = [row for _, sequences in made for row in sequences if isinstance(row, str)]
        if not wants or failed:
            reason = failed[0] if failed else "its rewards say nothing (too few completions, or all equal)"
            dropped[reason] = dropped.get(reason, 0) + 1
            continue
        kept.append(
            tuple(
                Example(group.prompt.id, tuple(s for s in sequences if isinstance(s, Sequence)), want.label)
                for want, sequences in made
            )
        )
    return Examples(tuple(kept), dropped)
