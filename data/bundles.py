"""Division of a global batch whose rows share prompts, so that examples of one prompt lie in one microbatch
as far as they fit into it and no rank waits long.

``data.balance`` does this for single examples, which it can exchange freely. Here it is done for bundles of
examples. Where ranks would wait for one with a large bundle, bundles are cut, although each part computes the
prompt once more.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Seq

import numpy as np

from data.balance import Shares, Work, evened, share_tokens
from data.types import Example

Bundle = list[Example]
Slots = list[list[Bundle]]
"""[slot][rank]: the examples that a rank computes in that slot"""
LARGEST = (math.inf, 0.7, 0.35, 0.25, 0.18, 0.12)
"""Largest bundles that are tried, relative to the cost of the mean share."""
NEAR = 1.02
"""No smaller bundles are tried where ranks take at most this many times what they would without waiting."""


def deal_together(
    batch: Seq[Example], ranks: int, most: int, by_tokens: bool, work: Work, apart: Slots
) -> Slots:
    """Deal the batch in as few slots as are found with at most ``most`` examples in a share, or ``by_tokens``
    with at most as many tokens in its rows with a gradient, a shared prompt counted once. On several ranks
    ``apart``, the batch dealt example by example, is the result where it takes less time than every way with
    bundles. Raises ValueError if a single example has too many tokens."""
    measure: Callable[[Bundle], int] = _tokens if by_tokens else len

    def cost(bundle: Bundle) -> int:
        return work.part(bundle, shared=True)

    if by_tokens:
        whole = [part for bundle in by_prompt(batch) for part in _halved(bundle, _tokens, most)]
        if max(map(_tokens, whole)) > most:
            raise ValueError(f"an example has more than {most} tokens")
    else:
        whole = [bundle[i : i + most] for bundle in by_prompt(batch) for i in range(0, len(bundle), most)]
    costs = [(bundle, cost(bundle)) for bundle in whole]
    least = sum(bundle_cost for _, bundle_cost in costs)
    candidates: list[tuple[int, Slots]] = [(_longest(apart, cost), apart)] if apart else []
    slots = max(1, -(-sum(map(measure, whole)) // (ranks * most)))
    while True:
        pieces, tried = costs, 0
        for largest in LARGEST if ranks > 1 else LARGEST[:1]:
            limit = largest * least / (slots * ranks)
            pieces = [
                (part, bundle_cost if part is bundle else cost(part))
                for bundle, bundle_cost in pieces
                for part in ([bundle] if bundle_cost <= limit else _halved(bundle, cost, limit))
            ]
            if len(pieces) == tried:
                continue
            tried = len(pieces)
            if (made := _dealt(pieces, slots, ranks, cost, measure, most)) is not None:
                candidates.append((_longest(made, cost), made))
                if candidates[-1][0] * ranks <= NEAR * least:
                    break
        if len(candidates) > bool(apart) or slots >= len(apart) > 0:
            return min(candidates, key=lambda one: one[0])[1]
        slots += 1  # the loop ends: with one share per bundle there is room


def by_prompt(batch: Seq[Example]) -> list[Bundle]:
    """Return the examples of each prompt, with the prompts in order of first appearance."""
    bundles: dict[bytes, Bundle] = {}
    for example in batch:
        bundles.setdefault(example.rows[0].prompt_ids.tobytes(), []).append(example)
    return list(bundles.values())


def _halved(bundle: Bundle, size: Callable[[Bundle], int], most: float) -> list[Bundle]:
    """Split the bundle into pieces of at most ``most`` by ``size``, or of one example."""
    if len(bundle) == 1 or size(bundle) <= most:
        return [bundle]
    half = len(bundle) // 2
    return [*_halved(bundle[:half], size, most), *_halved(bundle[half:], size, most)]


def _dealt(
    pieces: list[tuple[Bundle, int]],
    slots: int,
    ranks: int,
    cost: Callable[[Bundle], int],
    measure: Callable[[Bundle], int],
    most: int,
) -> Slots | None:
    """Distribute the pieces, each with its cost, over as many shares, each of at most ``most`` by
    ``measure``. The heaviest is placed first, and each goes to the share that costs least and has room for
    it. A piece measured in examples that fits nowhere is cut; None if one measured in tokens does not fit. On
    several ranks pieces are then exchanged. The heaviest shares are in the first slot; a slot without any
    example is left out."""
    parts = slots * ranks
    waiting = sorted(pieces, key=lambda piece: piece[1])  # pop() takes the last, the heaviest
    placed: list[tuple[Bundle, int]] = []
    sizes: list[int] = []
    shares: Shares = [[] for _ in range(parts)]
    loads, left = np.zeros(parts, np.int64), np.full(parts, most)
    while waiting:
        bundle, bundle_cost = waiting.pop()
        size = measure(bundle)
        fits = np.flatnonzero(left >= size)
        part = int(fits[loads[fits].argmin()]) if len(fits) else int(left.argmax())
        if not len(fits):
            if measure is not len:
                return None
            size = int(left[part])
            waiting.append((bundle[size:], cost(bundle[size:])))
            bundle, bundle_cost = bundle[:size], cost(bundle[:size])
        shares[part].append(len(placed))
        placed.append((bundle, bundle_cost))
        sizes.append(size)
        loads[part] += bundle_cost
        left[part] -= size
    if ranks > 1:
        shares = evened(
            shares, [bundle_cost for _, bundle_cost in placed], max(map(len, shares)) + 1, sizes, most
        )
    else:
        shares = [shares[part] for part in np.argsort(-loads, kind="stable")]
    dealt = [[example for i in share for example in placed[i][0]] for share in shares]
    every = [dealt[first : first + ranks] for first in range(0, parts, ranks)]
    return [slot for slot in every if any(slot)]


def _longest(slots: Slots, cost: Callable[[Bundle], int]) -> int:
    """Return what the ranks with most to do take, summed over slots."""
    return sum(max(map(cost, slot)) for slot in slots)


def _tokens(bundle: Bundle) -> int:
    """Return the number of tokens in the rows with a gradient."""
    return share_tokens(bundle, packed=True, shared=True)
