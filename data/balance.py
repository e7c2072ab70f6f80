"""Who computes which examples when: the ranks of a turn wait for the one that has most tokens.

A cost is a count of tokens: prompt and completion of all rows of an example, its mismatched row among them.
Memory grows by the token, and so does nearly all of the time (docs/performance.md has the count of
operations, and from which lengths on attention's squares are more than that).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence as Seq

import numpy as np

from data.sharing import own_tokens
from data.types import Example, Sequence

CLOSE = 1.005
"""Shares are alike if the heaviest is at most this many times their mean: nothing is tried for less."""
MIXTURES = 8
"""How many mixtures of long and short items are tried for a turn."""

Shares = list[list[int]]
"""Indices of the items of each rank."""


def example_tokens(example: Example) -> int:
    """Tokens that a rank computes for an example, without padding."""
    return sum(len(row) for rows in _forwards([example]) for row in rows)


def row_tokens(example: Example) -> int:
    """Tokens of the rows that the loss has a gradient for."""
    return sum(map(len, example.rows))


def share_tokens(share: Seq[Example], packed: bool, shared: bool = False) -> int:
    """Tokens that are computed for a share's rows with a gradient: their sum where they are packed, prompts
    that are ``shared`` once, else with the padding."""
    return _of_rows([row for example in share for row in example.rows], packed, shared)


def part_tokens(part: Seq[Example], packed: bool, shared: bool = False) -> int:
    """Tokens of the forwards of one rank's share of one turn."""
    return sum(_of_rows(rows, packed, shared) for rows in _forwards(part))


def _of_rows(rows: list[Sequence], packed: bool, shared: bool) -> int:
    if shared:
        return sum(own_tokens(rows))
    lengths = [len(row) for row in rows]
    return sum(lengths) if packed else len(lengths) * max(lengths, default=0)


def in_turns(costs: Seq[int], ranks: int, size: int) -> list[Shares]:
    """Indices into ``costs`` (each at least 1), [turn][rank]: in as few turns as there is room for with
    ``size`` items a rank and turn, about as many items in every turn. The same costs have the same answer.

    A turn has the longest items of those that are left. Where its ranks would wait for one of them, some of
    its items give way to the shortest of all: with two a rank, nothing among long items is short enough to go
    with the longest.
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
    """``count`` of the items ``left`` (the longest first), shared so that the ranks wait for as few tokens as
    in any mixture that is tried."""
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
    """Indices into ``costs`` (each at least 1) in ``parts`` lists of at most ``size``, their sums as alike as
    exchanges of two items make them; the list with the largest sum first, a list in rising order.

    Items are given out longest first, each to the part that has least (Graham 1969, "Bounds on
    Multiprocessing Timing Anomalies") and has room for it. Then an item of the heaviest part changes places
    with one that leaves the heavier of the two lightest, or moves to where there is room, for as long as that
    helps. Raises ValueError if there is no room for all.
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
    """Each item, the longest first, given to the part that has least and has room."""
    out: Shares = [[] for _ in range(parts)]
    least = [(0, p) for p in range(parts)]
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        load, p = heapq.heappop(least)
        out[p].append(i)
        if len(out[p]) < size:
            heapq.heappush(least, (load + costs[i], p))
    return out


def _slots(shares: Shares, costs: Seq[int], size: int) -> tuple[np.ndarray, np.ndarray]:
    """([parts, size] indices, -1 where there is room; [parts, size] their costs, 0 where there is room)."""
    owners = np.full((len(shares), size), -1, np.int64)
    for p, share in enumerate(shares):
        owners[p, : len(share)] = share
    return owners, np.where(owners < 0, 0, np.append(np.asarray(costs, np.int64), 0)[owners])


def _best_exchange(weights: np.ndarray, loads: np.ndarray, heaviest: int) -> tuple[int, int, int] | None:
    """(slot of ``heaviest``, other part, slot there) whose exchange leaves the heavier of the two lightest;
    None where every exchange leaves it as heavy as it is."""
    best, found = int(loads[heaviest]), None
    for slot, cost in enumerate(weights[heaviest]):
        given = cost - weights
        after = np.maximum(loads[heaviest] - given, loads[:, None] + given)
        at = int(after.argmin())
        if after.flat[at] < best:
            best, found = int(after.flat[at]), (slot, *divmod(at, weights.shape[1]))
    return found


def token_balance(turns: Seq[Seq[Seq[Example]]], packed: bool, shared: bool = False) -> float:
    """The share of the time in which ranks do not wait for each other, by tokens: the turns' means over
    ranks, added up, over the turns' maxima.

    ``turns[t][r]``: what rank r computes in turn t. Rows are ``packed``, or padded to the longest of theirs:
    then padding is computed too, and counts. Prompts that are ``shared`` count once. 1 on a single rank.
    """
    computed = [[part_tokens(part, packed, shared) for part in turn] for turn in turns]
    ranks = len(computed[0])
    return sum(map(sum, computed)) / (ranks * sum(map(max, computed)))


def _forwards(part: Seq[Example]) -> tuple[list[Sequence], list[Sequence]]:
    """(rows of the loss, mismatched rows) of these examples: a forward each."""
    mismatched = [example.mismatched for example in part if example.mismatched is not None]
    return [row for example in part for row in example.rows], mismatched
