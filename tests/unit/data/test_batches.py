"""Batches: a pure function of (seed, step), cut without loss, padded to their own longest row."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from data.balance import row_tokens, share_tokens
from data.batches import Segment, Tokens, collate, deal, microbatch
from data.types import Example, Sequence

CPU = torch.device("cpu")


def row(p: int, c: int, start: int = 0) -> Sequence:
    return Sequence(
        np.arange(start, start + p, dtype=np.int32), np.arange(100 + start, 100 + start + c, dtype=np.int32)
    )


class Counted(list):
    """Groups that count how often one is made."""

    made = 0

    def __getitem__(self, group):
        self.made += 1
        return super().__getitem__(group)


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=12),
    st.integers(1, 9),
    st.integers(1, 60),
    st.tuples(st.integers(0, 3), st.integers(0, 3)),
)
def test_batches_are_slices_of_the_shuffled_groups(sizes, batch_size, units, seed):
    """Groups of any sizes, their examples side by side, epoch after epoch, in an order of the segment's own.
    Any order of reading gives the same batches."""
    groups = Counted(tuple(Example(f"{g}", (row(1, 1),)) for _ in range(n)) for g, n in enumerate(sizes))
    plan = Segment(groups, batch_size, units, *seed)
    orders = (np.random.default_rng([*seed, epoch]).permutation(len(groups)) for epoch in range(units))
    stream = [example for order in orders for g in order for example in tuple(groups)[g]][:units]
    wanted = [stream[i : i + batch_size] for i in range(0, units, batch_size)]
    assert [plan.batch(i) for i in range(plan.steps)] == wanted
    assert groups.made <= len(sizes) * -(-units // sum(sizes)), "once an epoch, however small the batches"
    assert [plan.batch(i) for i in reversed(range(plan.steps))] == wanted[::-1]
    assert plan.done(0) == 0.0 and plan.done(plan.steps) == 1.0


@given(st.integers(1, 30), st.sampled_from([1, 2, 4]), st.integers(1, 8), st.booleans())
def test_a_cut_loses_nothing_and_gives_every_rank_as_many_microbatches(n, ranks, size, packed):
    batch = [Example(str(i), (row(1 + i % 4, 1 + (i * 7) % 11),)) for i in range(n)]
    dealt = deal(batch, ranks, size, 1, packed)
    parts = [[slot[rank] for slot in dealt] for rank in range(ranks)]
    assert len({len(p) for p in parts}) == 1
    dealt = Counter(e.prompt_id for p in parts for micro in p for e in micro)
    dealt.pop("", None)
    assert dealt == Counter(e.prompt_id for e in batch)
    assert all(0 < len(micro) <= size for p in parts for micro in p)


LENGTHS = st.lists(
    st.tuples(st.integers(1, 9), st.integers(1, 60), st.integers(1, 60)), min_size=1, max_size=40
)
WORLDS = st.sampled_from([(1, True), (1, False), (2, False), (4, False), (8, False)])


def pairs_of(lengths) -> list[Example]:
    return [Example(str(i), (row(p, a), row(p, b))) for i, (p, a, b) in enumerate(lengths)]


@given(LENGTHS, WORLDS, st.integers(1, 8))
def test_padded_rows_and_a_single_rank_are_dealt_in_slices_by_length(lengths, world, size):
    """So that little is padded, and a run on one rank computes what it always has, in the same order. A list
    that stays empty is filled up."""
    (ranks, packed), batch = world, pairs_of(lengths)
    names = [e.prompt_id for e in sorted(batch, key=lambda e: -max(len(row) for row in e.rows))]
    slots = -(-len(names) // (size * ranks))
    each = -(-len(names) // (slots * ranks))
    places = [[(slot * ranks + rank) * each for rank in range(ranks)] for slot in range(slots)]
    found = deal(batch, ranks, size, 2, packed)
    assert [[[e.prompt_id for e in part if e.prompt_id] for part in slot] for slot in found] == [
        [names[first : first + each] for first in firsts] for firsts in places
    ]


def test_what_fills_a_rank_up_has_as_many_forwards_as_the_others():
    """A rank with nothing but filling must still run the mismatched forward, or the others wait for it for
    ever."""
    batch = [Example(str(i), (row(1, 2),), mismatched=row(1, 3)) for i in range(3)]
    micros = [microbatch(part, CPU) for slot in deal(batch, 2, 1, 1) for part in slot]
    assert len(micros) == 4 and all(m.mismatched is not None for m in micros)
    assert [int(m.mismatched.mask.sum()) for m in micros].count(0) == 1


@pytest.mark.parametrize("pack", [False, True])
def test_collate_puts_every_token_where_it_says(pack):
    rows = [row(3, 4), row(1, 2, 20), Sequence(np.zeros(1, np.int32), np.zeros(0, np.int32)), row(5, 1, 40)]
    s = collate(rows, CPU, pack)
    flat = s.input_ids.flatten()
    assert s.mask.shape == (4, 4) and s.mask.sum(1).tolist() == [4, 2, 0, 1]
    assert torch.equal(flat[s.predict + 1], s.targets)  # a position predicts the token after it
    out = torch.zeros(s.mask.numel(), dtype=torch.long).index_put((s.cells,), s.targets).view(s.mask.shape)
    for r, original in enumerate(rows):
        assert out[r, : len(original.completion_ids)].tolist() == original.completion_ids.tolist()
    if pack:
        assert s.input_ids.shape[0] == 1 and s.position_ids[0].tolist() == [
            *range(7),
            *range(3),
            0,
            *range(6),
        ]


def test_pairs_stand_chosen_first_and_a_row_is_known_by_prompt_and_completion_apart():
    pairs = [Example("a", (row(1, 2), row(1, 5))), Example("b", (row(2, 3), row(2, 1)))]
    rows = microbatch(pairs, CPU).sequences.rows
    assert [len(r.completion_ids) for r in rows] == [2, 3, 5, 1]
    a = Sequence(np.array([1, 2], np.int32), np.array([3], np.int32))
    b = Sequence(np.array([1], np.int32), np.array([2, 3], np.int32))
    assert a.key != b.key and a.key == Sequence(a.prompt_ids.copy(), a.completion_ids.copy()).key


@given(LENGTHS, st.sampled_from([1, 2, 4, 8]), st.integers(138, 900), st.booleans())
def test_a_token_budget_takes_turns_until_no_share_is_above_it(lengths, ranks, most, packed):
    batch = pairs_of(lengths)
    slots = deal(batch, ranks, Tokens(most), 2, packed)
    assert all(len(slot) == ranks for slot in slots)
    assert all(share_tokens(share, packed) <= most for slot in slots for share in slot)
    given = [e.prompt_id for slot in slots for share in slot for e in share if e.prompt_id]
    assert sorted(given) == sorted(e.prompt_id for e in batch)
    fewest = -(-sum(map(row_tokens, batch)) // (ranks * most))
    assert len(slots) >= fewest and (not packed or len(slots) <= 2 * fewest + 1)


def test_an_example_above_the_budget_is_refused_and_its_mismatched_row_does_not_count():
    with pytest.raises(ValueError, match="more than 9 tokens"):
        deal([Example("a", (row(4, 6),))], 1, Tokens(9), 1)
    assert len(deal([Example("a", (row(4, 6),), mismatched=row(4, 90))], 1, Tokens(10), 1)) == 1
