"""Prompts that rows share: each row can be read off what is computed, and examples of a prompt are dealt
together."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from data.balance import Work, own_tokens, part_tokens, prompt_owners, share_tokens, token_balance
from data.batches import FILL, Tokens, collate, deal
from data.types import Example, Sequence
from tests.drawn_batches import COMPUTED, DRAWN, batch_of, busy, pairs_of

CPU = torch.device("cpu")


def row(prompt: int, p: int, c: int, completion: int = 0) -> Sequence:
    """A row whose prompt is told by ``prompt`` and its length."""
    return Sequence(
        np.arange(p, dtype=np.int32) + 100 * prompt, np.arange(c, dtype=np.int32) + 1000 + 50 * completion
    )


ROW = st.tuples(st.integers(0, 3), st.integers(1, 3), st.integers(1, 6), st.integers(0, 5))
ROWS = st.lists(ROW, min_size=1, max_size=12)


@given(ROWS, st.booleans())
def test_every_row_can_be_read_off_what_is_computed(drawn, masked):
    rows = [row(*of) for of in drawn]
    if masked:
        rows = [replace(r, loss_mask=np.arange(len(r.completion_ids)) % 2 == len(rows) % 2) for r in rows]
    made = collate(rows, CPU, pack=True, share=True)
    assert made.packed is not None and made.position_ids is not None
    tokens, positions = made.input_ids[0].numpy(), made.position_ids[0].numpy()
    before = np.split(made.predict.numpy(), np.cumsum([len(r.counted) for r in rows])[:-1])
    start = 0
    spans = zip(rows, made.packed.own, made.packed.prompts, before, strict=True)
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
    rows = [row(i, 2, 3, i) for i in range(4)]
    shared, plain = (collate(rows, CPU, pack=True, share=share) for share in (True, False))
    assert shared.packed == plain.packed and not plain.packed.shares
    assert torch.equal(shared.input_ids, plain.input_ids) and torch.equal(shared.predict, plain.predict)


def groups(sizes: list[int]) -> list[Example]:
    """Groups of so many answers, their answers not side by side."""
    drawn = [(g, k) for g, size in enumerate(sizes) for k in range(size)]
    order = np.random.default_rng(len(drawn)).permutation(len(drawn))
    return [
        Example(f"{g}", (row(g, 2 + 3 * (g % 4), 1 + (5 * g + 3 * k) % 7, k),), float(k))
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
