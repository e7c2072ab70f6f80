"""Distribution of examples over ranks and turns, so that ranks wait little for the one with the most tokens
in a turn.

A cost is a count of tokens: prompt and completion of all rows of an example, including its mismatched row.
Memory grows in proportion to the tokens, and so does nearly all of the time (docs/performance.md counts the
operations, and says from which lengths on attention's quadratic part dominates).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence as Seq

import numpy as np

from data.sharing import own_tokens
from data.types import Example, Sequence

CLOSE = 1.005
"""Shares count as equal if the heaviest is at most this many times their mean; no further exchange is tried
then."""
MIXTURES = 8
"""Number of mixtures of long and short items that are tried for a turn."""

Shares = list[list[int]]
"""Indices of the items of each rank."""


def example_tokens(example: Example) -> int:
    """Return the number of tokens that a rank computes for an example, without padding."""
    return sum(len(row) for rows in _forwards([example]) for row in rows)


def row_tokens(example: Example) -> int:
    """Return the number of tokens in the rows with a gradient."""
    return sum(map(len, example.rows))


def share_tokens(share: Seq[Example], packed: bool, shared: bool = False) -> int:
    """Return the number of tokens that are computed for a share's rows with a gradient. If rows are
    ``packed``, it is their sum, with prompts that are ``shared`` counted once; otherwise it includes the
    padding."""
    return _of_rows([row for example in share for row in example.rows], packed, shared)


def part_tokens(part: Seq[Example], packed: bool, shared: bool = False) -> int:
    """Return the number of tokens in the forward passes of one rank's share of one turn."""
    return sum(_of_rows(rows, packed, shared) for rows in _forwards(part))


def _of_rows(rows: list[Sequence], packed: bool, shared: bool) -> int:
    if shared:
        return sum(own_tokens(rows))
    lengths = [len(row) for row in rows]
    return sum(lengths) if packed else len(lengths) * max(lengths, default=0)


def in_turns(costs: Seq[int], ranks: int, size: int) -> list[Shares]:
    """Return indices into ``costs`` (each at least 1) as [turn][rank], in as few turns as possible with at
    most ``size`` items per rank and turn, and with about as many items in every turn. The same costs give the
    same result.

    A turn takes the longest remaining items. If its ranks would wait for one of them, some of its items are
    replaced by the shortest of all: with two items per rank, no other long item is short enough to go with
    the longest.
    """
    left = sorted(range(len(costs)), key=lambda i: -costs[i])
    turns = -(-len(left) // (size * ranks))
    # Deal evenly: a batch of 5 in two turns of 4 is 3 + 2, not 4 + 1.
    most = ranks * -(-len(left) // (turns * ranks)) if turns else 0
    out = []
    while left:
        out.append(_turn(left, min(most, len(left)), costs, ranks, size))
        taken = {i for share in out[-1] for i in share}
        left = [i for i in left if i not in taken]
    return out


def _turn(left: list[int], count: int, costs: Seq[int], ranks: int, size: int) -> Shares:
    """Return ``count`` of the items ``left`` (the longest first), distributed so that ranks wait for the
    fewest tokens among the mixtures tried."""
    best: Shares = []
    least = math.inf
    for short in sorted({count * i // MIXTURES for i in range(MIXTURES)}):
        items = left[: count - short] + left[len(left) - short :]
        shares = partition([costs[i] for i in items], ranks, size)
        loads = [sum(costs[items[j]] for j in share) for share in shares]
        waiting = max(loads) * ranks - sum(loads)
        if waiting < least:
            best, least = [[items[j] for j in share] for share in shares], waiting
        if count == len(left) or max(loads) * ranks <= CLOSE * sum(loads):
            break
    return best


def partition(costs: Seq[int], parts: int, size: int) -> Shares:
    """Split indices into ``costs`` (each at least 1) into ``parts`` lists of at most ``size`` items, with
    sums made as equal as exchanges of two items can make them. The list with the largest sum comes first, and
    each list is in ascending order.

    Items are placed longest first, each into the part that has the smallest sum (Graham 1969, "Bounds on
    Multiprocessing Timing Anomalies") and room for it. Then an item of the heaviest part is exchanged with
    the item that leaves the heavier of the two parts lightest, or moves to free room, as long as that helps.
    Raises ValueError if there is no room for all.
    """
    if len(costs) > parts * size:
        raise ValueError(f"{len(costs)} items do not fit into {parts} parts of {size}")
    owners, weights = _slots(_longest_first(costs, parts, size), costs, size)
    loads = weights.sum(axis=1)
    while loads.max() * parts > CLOSE * loads.sum():
        heaviest = int(loads.argmax())
        found = _best_exchange(weights, loads, heaviest)
        if found is None:
            break
        here, there = (heaviest, found[0]), found[1:]
        for slots in (owners, weights):
            slots[here], slots[there] = slots[there], slots[here]
        loads = weights.sum(axis=1)
    order = np.argsort(-loads, kind="stable")
    return [sorted(int(i) for i in owners[p] if i >= 0) for p in order]


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


def _slots(shares: Shares, costs: Seq[int], size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return ([parts, size] indices, -1 for free room; [parts, size] their costs, 0 for free room)."""
    owners = np.full((len(shares), size), -1, np.int64)
    for p, share in enumerate(shares):
        owners[p, : len(share)] = share
    return owners, np.where(owners < 0, 0, np.append(np.asarray(costs, np.int64), 0)[owners])


def _best_exchange(weights: np.ndarray, loads: np.ndarray, heaviest: int) -> tuple[int, int, int] | None:
    """Return (slot of ``heaviest``, other part, slot there) of the exchange that leaves the heavier of the
    two parts lightest; None if no exchange improves it."""
    best, found = int(loads[heaviest]), None
    for slot, cost in enumerate(weights[heaviest]):
        given = cost - weights
        after = np.maximum(loads[heaviest] - given, loads[:, None] + given)
        at = int(after.argmin())
        if after.flat[at] < best:
            best, found = int(after.flat[at]), (slot, *divmod(at, weights.shape[1]))
    return found


def token_balance(turns: Seq[Seq[Seq[Example]]], packed: bool, shared: bool = False) -> float:
    """Return the share of the time in which ranks do not wait for each other, measured in tokens: the sum of
    the turns' means over ranks, divided by the sum of the turns' maxima.

    ``turns[t][r]`` is what rank r computes in turn t. Rows are ``packed``, or padded to the longest row of
    their share; then padding is computed too and counts. Prompts that are ``shared`` count once. The result
    is 1 on a single rank.
    """
    computed = [[part_tokens(part, packed, shared) for part in turn] for turn in turns]
    ranks = len(computed[0])
    return sum(map(sum, computed)) / (ranks * sum(map(max, computed)))


def _forwards(part: Seq[Example]) -> tuple[list[Sequence], list[Sequence]]:
    """Return (rows of the loss, mismatched rows) of these examples; each list is one forward pass."""
    mismatched = [example.mismatched for example in part if example.mismatched is not None]
    return [row for example in part for row in example.rows], mismatched
