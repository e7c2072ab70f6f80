"""Distribution of examples over ranks and slots, so that ranks wait little for the one that computes longest
in a slot; and of bundles of examples whose rows share prompts (``deal_together``), so that examples of one
prompt lie in one microbatch as far as they fit into it. Where ranks would wait for one with a large bundle,
bundles are cut, although each part computes the prompt once more.

What a row costs (``Work``) is counted in tokens: one for each of its own, more for attention and for the
head, as the model's shape says, and less where nothing is trained on (a mismatched row). Memory grows in
proportion to the tokens alone.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy as np

from data.types import Example, Sequence

CLOSE = 1.005
"""Shares count as equal if the heaviest is at most this many times their mean; no further exchange is tried
then."""
MIXTURES = 8
"""Number of mixtures of long and short items that are tried for a slot."""
LIGHTEST = 16
"""Number of parts that are asked first for an exchange."""
ROOM = 3
"""Maximum number of items in a share that is limited by tokens, as a multiple of the average."""

LARGEST = (math.inf, 0.7, 0.35, 0.25, 0.18, 0.12)
"""Largest bundles that are tried, relative to the cost of the mean share."""
NEAR = 1.02
"""No smaller bundles are tried where ranks take at most this many times what they would without waiting."""

Bundle = list[Example]
Slots = list[list[Bundle]]
"""[slot][rank]: the examples that a rank computes in that slot"""
Shares = list[list[int]]
"""Indices of the items of each rank."""


@dataclass(frozen=True)
class Work:
    """What a row costs: a token of it 1, by the products of the blocks with their weights. The defaults count
    tokens alone, trained on or not."""

    square: float = 0.0
    """attention's operations for a pair of tokens, of those of the blocks' products for one token"""
    head: float = 0.0
    """the head's operations for a token of a completion, likewise"""
    other: float = 1.0
    """what a mismatched row costs, of what a row of the loss does"""

    def __str__(self) -> str:
        other = "" if self.other == 1 else f", mismatched rows {self.other:.3g}"
        return f"operations {self.square:.3g} {self.head:.3g}{other}"

    @classmethod
    def of(cls, architecture: Any, other: float = 1.0) -> Work:
        """Return what rows cost in a transformers configuration; without the numbers of a decoder in it,
        tokens alone count."""
        text_config = architecture.get_text_config()
        try:
            heads, layers = text_config.num_attention_heads, text_config.num_hidden_layers
            size = getattr(text_config, "head_dim", None) or text_config.hidden_size // heads
            keys = getattr(text_config, "num_key_value_heads", None) or heads
            inner = getattr(text_config, "moe_intermediate_size", None) or text_config.intermediate_size
            inner *= getattr(text_config, "num_experts_per_tok", None) or 1
            weights = text_config.hidden_size * (2 * size * (heads + keys) + 3 * inner)
            head = text_config.vocab_size * text_config.hidden_size / (layers * weights)
            return cls(heads * size / weights, head, other)
        except (AttributeError, TypeError):  # no such number, or one for each layer
            return cls(other=other)

    def rows(self, rows: Seq[Sequence], shared: bool) -> float:
        """Return the cost of one forward of packed rows, of which those with the same prompt may have it in
        common."""
        owners = prompt_owners(rows) if shared else range(len(rows))
        cost = 0.0
        for r, (row, owner) in enumerate(zip(rows, owners, strict=True)):
            n, c = max(len(row), 1), len(row.completion_ids)
            reused = 0 if owner == r else n - c
            cost += n - reused + self.square * (n * n - reused * reused) + self.head * c
        return cost

    def part(self, part: Seq[Example], shared: bool = False) -> int:
        """Return the cost of one rank's packed share of one slot, in tokens of a row of the loss, at least
        1. Forward and backward, which costs two forwards, are one cost: whether the reference scores the row
        too, or its activations are computed twice, changes what a row costs, but not beside others."""
        trained, other = _forwards(part)
        again = self.head * sum(len(row.completion_ids) for row in trained) / 3  # backward makes logits anew
        return max(1, round(self.rows(trained, shared) + again + self.other * self.rows(other, shared)))


TOKENS = Work()


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


def row_tokens(example: Example) -> int:
    """Return the number of tokens in the rows with a gradient."""
    return sum(map(len, example.rows))


def share_tokens(share: Seq[Example], packed: bool, shared: bool = False) -> int:
    """Return the number of tokens that are computed for a share's rows with a gradient. If rows are
    ``packed``, it is their sum, with prompts that are ``shared`` counted once; otherwise it includes the
    padding."""
    return _of_rows([row for example in share for row in example.rows], packed, shared)


def part_tokens(part: Seq[Example], packed: bool, shared: bool = False) -> int:
    """Return the number of tokens in the forward passes of one rank's share of one slot."""
    return sum(_of_rows(rows, packed, shared) for rows in _forwards(part))


def _of_rows(rows: list[Sequence], packed: bool, shared: bool) -> int:
    if shared:
        return sum(own_tokens(rows))
    lengths = [len(row) for row in rows]
    return sum(lengths) if packed else len(lengths) * max(lengths, default=0)


def in_slots(costs: Seq[int], ranks: int, size: int) -> list[Shares]:
    """Return indices into ``costs`` (each at least 1) as [slot][rank], in as few slots as possible with at
    most ``size`` items per rank and slot, and with about as many items in every slot. The same costs give the
    same result.

    A slot takes the longest remaining items. If its ranks would wait for one of them, some of its items are
    replaced by the shortest of all: with two items per rank, no other long item is short enough to go with
    the longest.
    """
    left = sorted(range(len(costs)), key=lambda i: -costs[i])
    slots = -(-len(left) // (size * ranks))
    # Deal evenly: a batch of 5 in two slots of 4 is 3 + 2, not 4 + 1.
    most = ranks * -(-len(left) // (slots * ranks)) if slots else 0
    out = []
    while left:
        out.append(_slot(left, min(most, len(left)), costs, ranks, size))
        taken = {i for share in out[-1] for i in share}
        left = [i for i in left if i not in taken]
    return out


def _slot(left: list[int], count: int, costs: Seq[int], ranks: int, size: int) -> Shares:
    """Return ``count`` of the items ``left`` (the longest first), distributed so that ranks wait least
    among the mixtures tried."""
    best: Shares = []
    least = math.inf
    for short in sorted({count * i // MIXTURES for i in range(MIXTURES)}):
        items = left[: count - short] + left[len(left) - short :]
        shares = partition([costs[i] for i in items], ranks, size)
        loads = _loads(shares, [costs[i] for i in items])
        waiting = max(loads) * ranks - sum(loads)
        if waiting < least:
            best, least = [[items[j] for j in share] for share in shares], waiting
        if count == len(left) or max(loads) * ranks <= CLOSE * sum(loads):
            break
    return best


def within(costs: Seq[int], tokens: Seq[int], ranks: int, most: int) -> list[Shares]:
    """Return indices into ``costs`` as [slot][rank], in as few slots as are found with at most ``most`` of
    ``tokens`` in a share, and with shares of about equal cost in a slot. Raises ValueError if a single item
    has more."""
    slots = max(1, -(-sum(tokens) // (ranks * most)))
    while slots <= len(costs):
        parts = slots * ranks
        size = ROOM * -(-len(costs) // parts)
        shares = partition(tokens, parts, size)
        if max(_loads(shares, tokens)) > most:
            shares = _first_that_fits(tokens, parts, size, most)
        if shares:
            shares = evened(shares, costs, size, tokens, most)
            return [shares[first : first + ranks] for first in range(0, parts, ranks)]
        slots += 1
    raise ValueError(f"an example has more than {most} tokens")


def _first_that_fits(tokens: Seq[int], parts: int, size: int, most: int) -> Shares:
    """Place each item, the longest first, into the first part that has room for it (Johnson 1973); [] if one
    finds no room."""
    out: Shares = [[] for _ in range(parts)]
    left = np.full(parts, most)
    for i in sorted(range(len(tokens)), key=lambda i: -tokens[i]):
        fits = [p for p in np.flatnonzero(left >= tokens[i]) if len(out[p]) < size]
        if not fits:
            return []
        out[fits[0]].append(i)
        left[fits[0]] -= tokens[i]
    return out


def partition(costs: Seq[int], parts: int, size: int) -> Shares:
    """Split indices into ``costs`` (each at least 1) into ``parts`` lists of at most ``size`` items, with
    sums made as equal as exchanges of two items can make them. The list with the largest sum comes first, and
    each list is in ascending order.

    Items are placed longest first, each into the part that has the smallest sum (Graham 1969, "Bounds on
    Multiprocessing Timing Anomalies") and room for it; then they are exchanged (``evened``). Raises
    ValueError if there is no room for all.
    """
    if len(costs) > parts * size:
        raise ValueError(f"{len(costs)} items do not fit into {parts} parts of {size}")
    return evened(_longest_first(costs, parts, size), costs, size)


def _longest_first(costs: Seq[int], parts: int, size: int) -> Shares:
    """Place each item, the longest first, into the part that has the smallest sum and room for it."""
    out: Shares = [[] for _ in range(parts)]
    least = [(0, p) for p in range(parts)]
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        load, p = heapq.heappop(least)
        out[p].append(i)
        if len(out[p]) < size:
            heapq.heappush(least, (load + costs[i], p))
    return out


def evened(
    shares: Shares, costs: Seq[int], size: int, tokens: Seq[int] | None = None, most: int = 0
) -> Shares:
    """Return the shares with their costs made as equal as exchanges of two items can make them: an item of
    the heaviest share is exchanged with the item that leaves the heavier of the two shares lightest, or moves
    to free room, as long as that helps. No share has more than ``size`` items then, or more than ``most`` of
    ``tokens`` (None: any number). The heaviest share comes first, and each is in ascending order."""
    owners = np.full((len(shares), size), -1, np.int64)
    for p, share in enumerate(shares):
        owners[p, : len(share)] = share
    weights = np.append(np.asarray(costs, np.int64), 0)[owners]
    taken = None if tokens is None else np.append(np.asarray(tokens, np.int64), 0)[owners]
    loads = weights.sum(axis=1)
    while loads.max() * len(shares) > CLOSE * loads.sum():
        heaviest, order = int(loads.argmax()), np.argsort(loads, kind="stable")
        exchange = _best_exchange(weights, loads, taken, most, heaviest, order[:LIGHTEST])
        if exchange is None:
            exchange = _best_exchange(weights, loads, taken, most, heaviest, order[LIGHTEST:])
        if exchange is None:
            break
        here, there = (heaviest, exchange[0]), exchange[1:]
        for table in (owners, weights) if taken is None else (owners, weights, taken):
            table[here], table[there] = table[there], table[here]
        loads = weights.sum(axis=1)
    order = np.argsort(-loads, kind="stable")
    return [sorted(int(i) for i in owners[p] if i >= 0) for p in order]


def _best_exchange(
    weights: np.ndarray,
    loads: np.ndarray,
    tokens: np.ndarray | None,
    most: int,
    heaviest: int,
    others: np.ndarray,
) -> tuple[int, int, int] | None:
    """Return (place in ``heaviest``, one of the ``others``, place there) of the exchange that leaves the
    heavier of the two parts lightest, and neither with more than ``most`` of ``tokens``; None if no exchange
    improves it."""
    best, exchange = int(loads[heaviest]), None
    if not len(others):
        return None
    others = np.sort(others)
    theirs, load = weights[others], loads[others, None]
    for mine, cost in enumerate(weights[heaviest]):
        shift = cost - theirs
        after = np.maximum(loads[heaviest] - shift, load + shift)
        if tokens is not None:
            moved, taken = tokens[heaviest, mine] - tokens[others], tokens.sum(axis=1)
            too_many = (taken[heaviest] - moved > most) | (taken[others, None] + moved > most)
            after = np.where(too_many, best, after)
        at = int(after.argmin())
        if after.flat[at] < best:
            other, place = divmod(at, theirs.shape[1])
            best, exchange = int(after.flat[at]), (mine, int(others[other]), place)
    return exchange


def _loads(shares: Shares, costs: Seq[int]) -> list[int]:
    return [sum(costs[i] for i in share) for share in shares]


def token_balance(slots: Seq[Seq[Seq[Example]]], packed: bool, shared: bool = False) -> float:
    """Return the share of the time in which ranks do not wait for each other, measured in tokens: the sum of
    the slots' means over ranks, divided by the sum of the slots' maxima.

    ``slots[t][r]`` is what rank r computes in slot t. Rows are ``packed``, or padded to the longest row of
    their share; then padding is computed too and counts. Prompts that are ``shared`` count once. The result
    is 1 on a single rank.
    """
    computed = [[part_tokens(part, packed, shared) for part in slot] for slot in slots]
    ranks = len(computed[0])
    return sum(map(sum, computed)) / (ranks * sum(map(max, computed)))


def _forwards(part: Seq[Example]) -> tuple[list[Sequence], list[Sequence]]:
    """Return (rows of the loss, mismatched rows) of these examples; each list is one forward pass."""
    mismatched = [example.mismatched for example in part if example.mismatched is not None]
    return [row for example in part for row in example.rows], mismatched


# Bundles of examples that share a prompt


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
            if (dealt := _dealt(pieces, slots, ranks, cost, measure, most)) is not None:
                candidates.append((_longest(dealt, cost), dealt))
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
        placed_costs = [bundle_cost for _, bundle_cost in placed]
        shares = evened(shares, placed_costs, max(map(len, shares)) + 1, sizes, most)
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
