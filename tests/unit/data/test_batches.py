"""Batches: a pure function of (seed, step), cut without loss and padded to their own longest row; dealt to
ranks so that none waits long; rows that share a prompt computed once."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from benchmarks import steps
from data.balance import (
    Work,
    in_slots,
    own_tokens,
    part_tokens,
    partition,
    prompt_owners,
    row_tokens,
    share_tokens,
    token_balance,
    within,
)
from data.batches import FILL, Segment, Tokens, collate, deal, microbatch
from data.types import Example, Sequence
from tests.drawn_batches import COMPUTED, DRAWN, batch_of, busy, measure, pairs_of

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


LENGTHS = st.lists(
    st.tuples(st.integers(1, 9), st.integers(1, 60), st.integers(1, 60)), min_size=1, max_size=40
)
WORLDS = st.sampled_from([(1, True), (1, False), (2, False), (4, False), (8, False)])


def pairs(lengths) -> list[Example]:
    return [Example(str(i), (row(p, a), row(p, b))) for i, (p, a, b) in enumerate(lengths)]


@given(LENGTHS, WORLDS, st.integers(1, 8))
def test_padded_rows_and_a_single_rank_are_dealt_in_slices_by_length(lengths, world, size):
    """So that little is padded, and a run on one rank computes what it always has, in the same order. A list
    that stays empty is filled up."""
    (ranks, packed), batch = world, pairs(lengths)
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
        positions = [i for original in rows for i in range(len(original))]
        assert s.input_ids.shape[0] == 1 and s.position_ids[0].tolist() == positions


def test_pairs_stand_chosen_first_and_a_row_is_known_by_prompt_and_completion_apart():
    pairs = [Example("a", (row(1, 2), row(1, 5))), Example("b", (row(2, 3), row(2, 1)))]
    rows = microbatch(pairs, CPU).sequences.rows
    assert [len(r.completion_ids) for r in rows] == [2, 3, 5, 1]
    one, other = (Sequence(np.arange(at, dtype=np.int32), np.arange(at, 3, dtype=np.int32)) for at in (1, 2))
    assert one.key != other.key and one.key == replace(one, prompt_ids=one.prompt_ids.copy()).key


@given(LENGTHS, st.sampled_from([1, 2, 4, 8]), st.integers(138, 900), st.booleans())
def test_a_token_budget_takes_turns_until_no_share_is_above_it(lengths, ranks, most, packed):
    batch = pairs(lengths)
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


# Ranks with about as much to do


COSTS = st.lists(st.integers(1, 3000), min_size=1, max_size=60)


@given(COSTS, st.integers(1, 9), st.integers(0, 5))
def test_every_item_is_in_one_part_and_no_part_is_over_its_size(costs, parts, room):
    size = -(-len(costs) // parts) + room
    found = partition(costs, parts, size)
    assert sorted(i for part in found for i in part) == list(range(len(costs)))
    assert len(found) == parts and all(len(part) <= size and part == sorted(part) for part in found)
    assert sum(map(bool, found)) == min(parts, len(costs)), "a part is empty only where items are too few"
    loads = [sum(costs[i] for i in part) for part in found]
    assert loads == sorted(loads, reverse=True)
    assert partition(list(costs), parts, size) == found


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
    """Backward costs two forwards, and makes the logits anew."""
    batch = batch_of(pairs_of("heavy", 64, 4096), "kto", 64, 4096, np.random.default_rng(0))
    model = steps.without_weights(COMPUTED)
    monkeypatch.setattr(steps, "without_weights", lambda _: model)
    logits = 2.0 * COMPUTED.vocab_size * COMPUTED.hidden_size
    for scored in (False, True):
        work, ratios = Work.of(COMPUTED, other=1 / 2 if scored else 1 / 3), []
        for e in batch:
            rows, other = (sum(steps.forward(COMPUTED, of)) for of in (e.rows, [e.mismatched]))
            training = 3 * rows + logits * len(e.rows[0].completion_ids)
            ratios.append((training + other + scored * (rows + other)) / work.part([e]))
        assert max(ratios) / min(ratios) < 1.015


@pytest.mark.parametrize("kind", DRAWN)
def test_ranks_have_as_many_operations_where_the_longest_row_allows_it(kind):
    """And mismatched rows, which cost time and no memory, take no further microbatches: a budget's slots are
    as few as its tokens allow."""
    pairs, work = pairs_of(kind, 1024, 4096), Work.of(COMPUTED, other=1 / 3)
    for loss, (ranks, least), (size, slots) in itertools.product(
        ("dpo", "kto", "grpo"), ((8, 0.95), (64, 0.9)), ((8, 1), (4, 2))
    ):
        even, possible = measure(pairs, loss, ranks, size, slots, 4096)
        assert even >= min(least, 0.97 * possible), (loss, ranks, size)
    for ranks in (1, 8, 16):
        batch = batch_of(pairs, "kto", 32 * ranks, 4096, np.random.default_rng(ranks))
        dealt = deal(batch, ranks, Tokens(8192), 1, work=work)
        assert len(dealt) == -(-sum(map(row_tokens, batch)) // (8192 * ranks))
        assert busy(dealt, work, False)[0] >= 0.95


# Prompts that rows share


def shared_row(prompt: int, p: int, c: int, completion: int = 0) -> Sequence:
    """A row whose prompt is told by ``prompt`` and its length."""
    return Sequence(
        np.arange(p, dtype=np.int32) + 100 * prompt, np.arange(c, dtype=np.int32) + 1000 + 50 * completion
    )


ROW = st.tuples(st.integers(0, 3), st.integers(1, 3), st.integers(1, 6), st.integers(0, 5))
ROWS = st.lists(ROW, min_size=1, max_size=12)


@given(ROWS, st.booleans())
def test_every_row_can_be_read_off_what_is_computed(drawn, masked):
    rows = [shared_row(*of) for of in drawn]
    if masked:
        rows = [replace(r, loss_mask=np.arange(len(r.completion_ids)) % 2 == len(rows) % 2) for r in rows]
    made = collate(rows, CPU, pack=True, share=True)
    assert made.packed is not None and made.position_ids is not None
    tokens, positions = made.input_ids[0].numpy(), made.position_ids[0].numpy()
    before = np.split(made.predict.numpy(), np.cumsum([len(r.counted) for r in rows])[:-1])
    start = 0
    spans = zip(rows, made.packed.lengths, made.packed.prompts, before, strict=True)
    for r, own, (first, count), predicted in spans:
        places = np.concatenate([np.arange(first, first + count), np.arange(start, start + own)])
        assert tokens[places].tolist() == [*r.prompt_ids, *r.completion_ids]
        assert positions[places].tolist() == list(range(len(r)))
        assert predicted.tolist() == places[len(r.prompt_ids) - 1 + r.counted].tolist()
        start += own
    assert start == len(tokens) == sum(own_tokens(rows))
    prompts = {r.prompt_ids.tobytes(): len(r.prompt_ids) for r in rows}
    assert start == sum(prompts.values()) + sum(len(r.completion_ids) for r in rows)
    plain = collate(rows, CPU, pack=True)
    assert torch.equal(made.mask, plain.mask) and torch.equal(made.targets, plain.targets)
    assert torch.equal(made.cells, plain.cells)


def test_without_a_common_prompt_nothing_is_shared_and_nothing_differs():
    rows = [FILL.rows[0], FILL.rows[0], Sequence(np.zeros(1, np.int32), np.ones(2, np.int32))]
    assert prompt_owners(rows) == [0, 1, 2] and own_tokens(rows) == [1, 1, 3]
    assert not collate(rows, CPU, pack=True, share=True).packed.shares
    rows = [shared_row(i, 2, 3, i) for i in range(4)]
    shared, plain = (collate(rows, CPU, pack=True, share=share) for share in (True, False))
    assert shared.packed == plain.packed and not plain.packed.shares
    assert torch.equal(shared.input_ids, plain.input_ids) and torch.equal(shared.predict, plain.predict)


def groups(sizes: list[int]) -> list[Example]:
    """Groups of so many answers, their answers not side by side."""
    drawn = [(g, k) for g, size in enumerate(sizes) for k in range(size)]
    order = np.random.default_rng(len(drawn)).permutation(len(drawn))
    return [
        Example(f"{g}", (shared_row(g, 2 + 3 * (g % 4), 1 + (5 * g + 3 * k) % 7, k),), float(k))
        for g, k in (drawn[i] for i in order)
    ]


def dealt(batch: list[Example], ranks: int, size: int | Tokens) -> list[list[list[Example]]]:
    slots = deal(batch, ranks, size, 1, packed=True, shared=True)
    names = Counter((e.prompt_id, e.label) for slot in slots for part in slot for e in part if e.prompt_id)
    assert names == Counter((e.prompt_id, e.label) for e in batch), "every example once"
    assert all(len(slot) == ranks and any(e.prompt_id for part in slot for e in part) for slot in slots)
    return slots


SIZES = st.lists(st.integers(1, 9), min_size=1, max_size=12)


@given(SIZES, st.sampled_from([1, 2, 4]), st.integers(1, 12), st.integers(18, 80))
def test_nothing_is_lost_and_no_microbatch_is_larger_by_count_or_tokens(sizes, ranks, size, most):
    batch = groups(sizes)
    slots = dealt(batch, ranks, size)
    assert len(slots) <= -(-len(batch) // (ranks * size))
    assert all(0 < len(part) <= size for slot in slots for part in slot)
    slots = dealt(batch, ranks, Tokens(most))
    assert all(share_tokens(part, packed=True, shared=True) <= most for slot in slots for part in slot)
    cut = dealt(groups([57]), 2, 16)
    assert len(cut) == 2, "a group larger than a microbatch is cut"


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_groups_that_fit_stay_together_and_ranks_have_as_much_to_do(ranks):
    batch = groups([8] * 16)
    slots = dealt(batch, ranks, 16)
    parts = [part for slot in slots for part in slot]
    assert {count for part in parts for count in Counter(e.prompt_id for e in part).values()} == {8}
    assert token_balance(slots, packed=True, shared=True) > (0.9 if ranks > 1 else 0.999)
    assert sum(part_tokens(part, True, True) for part in parts) < sum(len(e.rows[0]) for e in batch)


@pytest.mark.parametrize("kind", DRAWN)
@pytest.mark.parametrize(("ranks", "size"), [(2, 8), (8, 8), (16, 16), (64, 8), (16, Tokens(8192))])
def test_a_step_takes_no_longer_than_without_sharing(kind, ranks, size):
    """Groups as large as a rank's share: whole bundles would leave ranks waiting."""
    work, count = Work.of(COMPUTED), ranks * (size if isinstance(size, int) else 32)
    batch = batch_of(pairs_of(kind, 512, 4096), "grpo", count, 4096, np.random.default_rng(ranks))
    batch = [replace(example, label=float(i)) for i, example in enumerate(batch)]
    slots = deal(batch, ranks, size, 1, shared=True, work=work)
    assert sorted(e.label for slot in slots for part in slot for e in part if e.prompt_id) == [*range(count)]
    alone, before = busy(deal(batch, ranks, size, 1, work=work), work, False)
    even, took = busy(slots, work, True)
    assert took <= before and even > 0.9 * alone
