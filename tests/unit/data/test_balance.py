"""Examples dealt to ranks by tokens: none is lost, no rank has more than there is room for, and none waits
long."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from benchmarks import steps
from data.balance import CLOSE, Work, in_slots, partition, row_tokens, token_balance, within
from data.batches import Tokens, deal
from data.types import Example, Sequence
from tests.drawn_batches import COMPUTED, DRAWN, batch_of, busy, measure, pairs_of

COSTS = st.lists(st.integers(1, 3000), min_size=1, max_size=60)


def row(p: int, c: int) -> Sequence:
    return Sequence(np.zeros(p, np.int32), np.zeros(c, np.int32))


def loads_of(lists: list[list[int]], costs: list[int]) -> list[int]:
    return [sum(costs[i] for i in part) for part in lists]


@given(COSTS, st.integers(1, 9), st.integers(0, 5))
def test_every_item_is_in_one_part_and_no_part_is_over_its_size(costs, parts, room):
    size = -(-len(costs) // parts) + room
    found = partition(costs, parts, size)
    assert sorted(i for part in found for i in part) == list(range(len(costs)))
    assert len(found) == parts and all(len(part) <= size and part == sorted(part) for part in found)
    assert sum(map(bool, found)) == min(parts, len(costs)), "a part is empty only where items are too few"
    loads = loads_of(found, costs)
    assert loads == sorted(loads, reverse=True)
    assert partition(list(costs), parts, size) == found


@settings(max_examples=50)
@given(COSTS, st.integers(2, 6), st.integers(0, 2))
def test_no_exchange_and_no_move_would_make_the_heaviest_part_lighter(costs, parts, room):
    size = -(-len(costs) // parts) + room
    found = partition(costs, parts, size)
    first, *loads = loads_of(found, costs)
    if first * parts <= CLOSE * sum(costs):
        return
    for i in found[0]:
        for part, load in zip(found[1:], loads, strict=True):
            others = [costs[j] for j in part] + ([0] if len(part) < size else [])
            assert all(max(first - costs[i] + c, load + costs[i] - c) >= first for c in others)


@example([1] * 5, 1, 4)
@given(COSTS, st.integers(1, 6), st.integers(1, 5))
def test_every_item_has_its_slot_and_slots_are_as_few_as_can_be(costs, ranks, size):
    slots = in_slots(costs, ranks, size)
    assert sorted(i for slot in slots for share in slot for i in share) == list(range(len(costs)))
    assert len(slots) == -(-len(costs) // (ranks * size)) and all(len(slot) == ranks for slot in slots)
    assert all(len(share) <= size for slot in slots for share in slot)
    counts = [sum(map(len, slot)) for slot in slots]
    assert counts[:-1] == counts[:1] * (len(counts) - 1) and 0 < counts[-1] <= counts[0]
    assert counts[0] < ranks + len(costs) / len(slots), "the mean, to the next that all ranks share alike"
    assert max(costs) in [costs[i] for share in slots[0] for i in share], "the longest comes first"
    assert in_slots(list(costs), ranks, size) == slots


@given(st.data(), COSTS, st.integers(1, 6))
def test_no_share_has_more_tokens_than_there_is_room_for_whatever_rows_cost(data, tokens, ranks):
    costs = data.draw(st.lists(st.integers(1, 3000), min_size=len(tokens), max_size=len(tokens)))
    most = data.draw(st.integers(max(tokens), 2 * max(tokens)))
    slots = within(costs, tokens, ranks, most)
    assert sorted(i for slot in slots for share in slot for i in share) == list(range(len(costs)))
    assert max(sum(tokens[i] for i in share) for slot in slots for share in slot) <= most


def test_the_balance_is_the_share_of_time_in_which_no_rank_waits():
    sizes = ((10, None), (4, None), (6, row(1, 1)), (8, None))
    a, b, c, d = (Example("x", (row(1, n - 1),), mismatched=m) for n, m in sizes)
    slots = [[[a], [b, c]], [[d], [b]]]
    assert math.isclose(token_balance(slots, packed=True), ((10 + 12) + (8 + 4)) / 2 / (12 + 8))
    # rank 1 computes two rows of 6 on a grid, and the mismatched row by itself
    assert math.isclose(token_balance(slots, packed=False), ((10 + 14) + (8 + 4)) / 2 / (14 + 8))
    assert {token_balance([[[a, b]], [[c]]], packed) for packed in (False, True)} == {1.0}, "on one rank"


def test_what_examples_cost_is_in_proportion_to_their_operations(monkeypatch):
    batch = batch_of(pairs_of("heavy", 64, 4096), "kto", 64, 4096, np.random.default_rng(0))
    model = steps.without_weights(COMPUTED)
    monkeypatch.setattr(steps, "without_weights", lambda _: model)
    costs = [(steps.forward(COMPUTED, e.rows), steps.forward(COMPUTED, [e.mismatched])) for e in batch]
    for scored in (False, True):
        work = Work.of(COMPUTED, other=1 / 2 if scored else 1 / 3)
        ratios = [
            (rows.training + other.scoring + scored * (rows.scoring + other.scoring)) / work.part([e])
            for e, (rows, other) in zip(batch, costs, strict=True)
        ]
        assert max(ratios) / min(ratios) < 1.015


@pytest.mark.parametrize("kind", DRAWN)
def test_ranks_have_as_many_operations_where_the_longest_row_allows_it(kind):
    """And mismatched rows, which cost time and no memory, take no further microbatches: a budget's slots are
    as few as its tokens allow."""
    pairs, work = pairs_of(kind, 1024, 4096), Work.of(COMPUTED, other=1 / 3)
    for loss, (ranks, least), (size, slots) in itertools.product(
        ("dpo", "kto", "grpo"), ((8, 0.95), (64, 0.9)), ((8, 1), (4, 2))
    ):
        found = measure(pairs, loss, ranks, size, slots, 4096)
        assert found.after >= min(least, 0.97 * found.possible), (loss, ranks, size)
    for ranks in (1, 8, 16):
        batch = batch_of(pairs, "kto", 32 * ranks, 4096, np.random.default_rng(ranks))
        dealt = deal(batch, ranks, Tokens(8192), 1, work=work)
        assert len(dealt) == -(-sum(map(row_tokens, batch)) // (8192 * ranks))
        assert busy(dealt, work, False)[0] >= 0.95
