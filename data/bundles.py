"""Division of a global batch whose rows share prompts, so that examples of one prompt lie in one microbatch
as far as they fit into it.

``data.balance`` does this for single examples, which it can exchange freely. Here it is done for bundles of
examples: the heaviest bundle comes first, and each goes to the share with the fewest tokens.
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
    """Deal the batch in as few turns as possible with at most ``size`` examples per rank and turn."""
    turns = -(-len(batch) // (size * ranks))
    bundles = [bundle[i : i + size] for bundle in by_prompt(batch) for i in range(0, len(bundle), size)]
    return _in_turns(_shares(bundles, turns * ranks, size), ranks)


def deal_by_tokens(batch: Seq[Example], ranks: int, most: int) -> Turns:
    """Deal the batch in as few turns as possible with at most ``most`` tokens per share. A shared prompt
    counts once. Mismatched rows, which keep nothing for backward, do not count. Raises ValueError if a single
    example has more."""
    bundles = [part for bundle in by_prompt(batch) for part in _within(bundle, most)]
    total = sum(_tokens(bundle) for bundle in bundles)
    turns = max(1, -(-total // (ranks * most)))
    while True:
        shares = _shares(bundles, turns * ranks, len(batch))
        if max(map(_tokens, shares)) <= most:
            return _in_turns(shares, ranks)
        turns += 1  # the loop ends: with one share per bundle there is room


def by_prompt(batch: Seq[Example]) -> list[Bundle]:
    """Return the examples of each prompt, with the prompts in order of first appearance."""
    found: dict[bytes, Bundle] = {}
    for example in batch:
        found.setdefault(example.rows[0].prompt_ids.tobytes(), []).append(example)
    return list(found.values())


def _within(bundle: Bundle, most: int) -> list[Bundle]:
    """Split the bundle into pieces of at most ``most`` tokens."""
    if _tokens(bundle) <= most:
        return [bundle]
    if len(bundle) == 1:
        raise ValueError(f"an example has more than {most} tokens")
    half = len(bundle) // 2
    return [*_within(bundle[:half], most), *_within(bundle[half:], most)]


def _shares(bundles: list[Bundle], parts: int, room: int) -> list[Bundle]:
    """Distribute the bundles over ``parts`` shares of at most ``room`` examples and return the heaviest share
    first. The heaviest bundle is placed first, and each goes to the share that has the fewest tokens and room
    for it. A bundle that fits nowhere is cut."""
    waiting = sorted(bundles, key=_cost)  # pop() takes the last, the heaviest
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
    """Return the shares in turns, with shares of about equal weight in the same turn. A turn without any
    example is left out."""
    turns = [shares[first : first + ranks] for first in range(0, len(shares), ranks)]
    return [turn for turn in turns if any(turn)]


def _cost(bundle: Bundle) -> int:
    """Return the number of tokens of all forward passes."""
    return part_tokens(bundle, packed=True, shared=True)


def _tokens(bundle: Bundle) -> int:
    """Return the number of tokens in the rows with a gradient."""
    return share_tokens(bundle, packed=True, shared=True)
