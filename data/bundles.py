"""Dealing a global batch whose rows share prompts: examples of one prompt lie in one microbatch, as far as
they fit into it.

What ``data.balance`` does for single examples, which it can exchange freely, is done here for bundles of
them: the heaviest bundle first, each to the share that has least.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

from data.balance import part_tokens, share_tokens
from data.types import Example

Bundle = list[Example]
Turns = list[list[Bundle]]
"""[turn][rank]: the examples that a rank computes in that turn"""


def deal_by_count(batch: Seq[Example], ranks: int, size: int) -> Turns:
    """In as few turns as there is room for with ``size`` examples a rank and turn."""
    turns = -(-len(batch) // (size * ranks))
    bundles = [bundle[i : i + size] for bundle in by_prompt(batch) for i in range(0, len(bundle), size)]
    return _in_turns(_shares(bundles, turns * ranks, size), ranks)


def deal_by_tokens(batch: Seq[Example], ranks: int, most: int) -> Turns:
    """As few turns as it takes for no share to have more than ``most`` tokens, a shared prompt counted once
    and mismatched rows, which keep nothing for backward, not at all. Raises ValueError if a single example
    has more."""
    bundles = [part for bundle in by_prompt(batch) for part in _within(bundle, most)]
    total = sum(_tokens(bundle) for bundle in bundles)
    turns = max(1, -(-total // (ranks * most)))
    while True:
        shares = _shares(bundles, turns * ranks, len(batch))
        if max(map(_tokens, shares)) <= most:
            return _in_turns(shares, ranks)
        turns += 1  # it ends: with a share for every bundle there is room


def by_prompt(batch: Seq[Example]) -> list[Bundle]:
    """The examples of each prompt, prompts in the order in which they come."""
    found: dict[bytes, Bundle] = {}
    for example in batch:
        found.setdefault(example.rows[0].prompt_ids.tobytes(), []).append(example)
    return list(found.values())


def _within(bundle: Bundle, most: int) -> list[Bundle]:
    """The bundle in pieces of at most ``most`` tokens."""
    if _tokens(bundle) <= most:
        return [bundle]
    if len(bundle) == 1:
        raise ValueError(f"an example has more than {most} tokens")
    half = len(bundle) // 2
    return [*_within(bundle[:half], most), *_within(bundle[half:], most)]


def _shares(bundles: list[Bundle], parts: int, room: int) -> list[Bundle]:
    """The bundles in ``parts`` shares of at most ``room`` examples, the heaviest share first: the heaviest
    bundle first, each to the share that has fewest tokens and room for it. One that fits nowhere is cut."""
    waiting = sorted(bundles, key=_cost)  # the last is taken first
    shares: list[Bundle] = [[] for _ in range(parts)]
    loads, left = np.zeros(parts, np.int64), np.full(parts, room)
    while waiting:
        bundle = waiting.pop()
        fits = np.flatnonzero(left >= len(bundle))
        part = int(fits[loads[fits].argmin()]) if len(fits) else int(left.argmax())
        taken = bundle[: left[part]]
        if len(taken) < len(bundle):
            waiting.append(bundle[len(taken) :])
        shares[part] += taken
        loads[part] += _cost(taken)
        left[part] -= len(taken)
    return [shares[part] for part in np.argsort(-loads, kind="stable")]


def _in_turns(shares: list[Bundle], ranks: int) -> Turns:
    """Shares that are about equally heavy side by side; a turn in which nobody has anything is none."""
    turns = [shares[first : first + ranks] for first in range(0, len(shares), ranks)]
    return [turn for turn in turns if any(turn)]


def _cost(bundle: Bundle) -> int:
    """Tokens of all forwards."""
    return part_tokens(bundle, packed=True, shared=True)


def _tokens(bundle: Bundle) -> int:
    """Tokens of the rows that the loss has a gradient for."""
    return share_tokens(bundle, packed=True, shared=True)
