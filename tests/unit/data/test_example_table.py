"""Examples that are made when they are asked for are those that were held before: from a file of token ids
and from memory, of any groups."""

from __future__ import annotations

import gc
import itertools
import tracemalloc
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from data import token_cache, views
from data.balance import share_tokens
from data.batches import Segment
from data.examples import (
    Examples,
    ExampleTable,
    columns_of,
    groups_digest,
    longest,
    make_examples,
    picked_groups,
    prompts_digest,
    token_ids,
    with_tokens,
)
from data.token_cache import TokenCache
from data.types import Completion, Example, Group, Prompt, Turn
from tests.tiny import random_groups
from tests.unit.data.test_token_cache import plain, renderer

VIEWS = (views.pairs, views.labelled, views.group_advantages, views.demonstrations)


@st.composite
def completions(draw: st.DrawFn) -> Completion:
    if draw(st.booleans()):
        words = draw(st.sampled_from(["", "yes", "no no", "there " * 40]))
        return Completion(words, finished=draw(st.booleans()))
    ids = tuple(draw(st.lists(st.integers(5, 9), min_size=1, max_size=6)))
    some = st.one_of(st.none(), st.lists(st.floats(-4, 0, width=32), min_size=len(ids), max_size=len(ids)))
    masks = st.one_of(st.none(), st.lists(st.booleans(), min_size=len(ids), max_size=len(ids)))
    known, mask = draw(some), draw(masks)
    return Completion(
        token_ids=ids,
        finished=draw(st.booleans()),
        behavior_logprobs=None if known is None else tuple(known),
        loss_mask=None if mask is None else tuple(mask),
    )


@st.composite
def groups(draw: st.DrawFn) -> Group:
    of = draw(st.lists(completions(), max_size=4))
    number = draw(st.integers(0, 9))
    turns = (Turn("system", "endless " * 80),) if number == 9 else ()
    prompt = Prompt((*turns, Turn("user", f"question {number} " + "the " * (number * 5))))
    return Group(prompt, tuple(of), tuple(draw(st.sampled_from([0.0, 1.0, -1.0, 0.5])) for _ in of))


def held(wanted: list[Group], view: views.View) -> tuple[list[tuple[Example, ...]], dict[str, int]]:
    """All examples at once, group by group, and why the other groups gave none."""
    made, dropped, of = [], Counter(), renderer()
    for group in wanted:
        wants = view(group)
        rows = [
            [
                with_tokens(of.sequence(group.prompt, group.completions[i]), group.completions[i])
                for i in want.completions
            ]
            for want in wants
        ]
        bad = [row for example in rows for row in example if isinstance(row, str)]
        if not wants or bad:
            dropped[bad[0] if bad else "its rewards say nothing (too few completions, or all equal)"] += 1
        else:
            labels = [want.label for want in wants]
            made.append(tuple(map(Example, itertools.repeat(group.prompt.id), map(tuple, rows), labels)))
    return made, dropped


def same(made: Examples, want: list[tuple[Example, ...]], dropped: dict[str, int]) -> None:
    assert list(made.dropped.items()) == list(dropped.items())
    assert plain(made.groups) == plain(want) and len(made.groups) == len(want)
    assert made.count == sum(map(len, want))
    ours, theirs = columns_of(made.groups), columns_of(want)
    for name, values in vars(theirs).items():
        assert getattr(ours, name).tolist() == values.tolist(), name
    assert ours.signs.tolist() == theirs.signs.tolist()
    ids = [np.sort(np.concatenate([np.zeros(0), *token_ids(g)])) for g in (made.groups, want)]
    assert ids[0].tolist() == ids[1].tolist()
    if want:
        for packed in (True, False):
            most = longest(made.groups, packed)
            assert plain([[most]]) == plain([[longest(want, packed)]])
            assert share_tokens([most], packed) == max(share_tokens([e], packed) for g in want for e in g)


@settings(max_examples=60)
@given(st.lists(groups(), max_size=8), st.sampled_from(VIEWS))
def test_a_table_gives_what_would_be_held(tmp_path_factory, wanted, view):
    want, dropped = held(wanted, view)
    cache = TokenCache(tmp_path_factory.mktemp("cache"), worth=1)
    for made in (make_examples(wanted, view, renderer(), cache) for _ in range(2)):  # written, then read
        same(made, want, dropped)
    same(make_examples(wanted, view, renderer()), want, dropped)
    held_in_memory = tuple(make_examples(wanted, view, renderer()).groups)
    assert groups_digest(made.groups) == groups_digest(held_in_memory), "wherever the rows are"
    order = np.random.default_rng(len(wanted)).permutation(len(want))
    assert plain(picked_groups(made.groups, order)) == plain([want[i] for i in order])
    assert plain(made.groups[1:]) == plain(want[1:])


def test_an_added_end_token_has_no_log_mu_and_counts() -> None:
    known, mask = (-1.0, -2.0), (True, False)
    sampled = Completion("yes", (5, 6), behavior_logprobs=known, loss_mask=mask)
    row = with_tokens(renderer().sequence(Prompt((Turn("user", "a"),)), sampled), sampled)
    assert len(row.completion_ids) == 3 and row.loss_mask.tolist() == [True, False, True]
    assert row.behavior_logprobs[:2].tolist() == [*known] and np.isnan(row.behavior_logprobs[2])


def most_memory(folder: Path, count: int) -> tuple[int, int]:
    """(the most memory at once, what is left at the end), bytes, of pairs made into batches."""
    answers = Completion("yes " * 40), Completion("no " * 40)
    asked = (Prompt((Turn("user", f"question {i} " + "the one " * 20),)) for i in range(count))
    groups = [Group(prompt, answers, (1.0, -1.0)) for prompt in asked if prompt.id]  # ids are kept in them
    gc.collect()
    tracemalloc.start()
    made = make_examples(groups, views.pairs, renderer(), TokenCache(folder, worth=1))
    assert made.count == count and isinstance(made.groups, ExampleTable)
    plan = Segment(made.groups, 8, count, seed=0)
    assert len({example.prompt_id for i in range(3) for example in plan.batch(i)}) == 24
    gc.collect()
    left, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return most, left


def test_memory_grows_by_less_than_a_row_of_text_a_pair(tmp_path, monkeypatch):
    """A pair here is 600 characters and 150 tokens: its rows as objects take 1,500 bytes."""
    monkeypatch.setattr(token_cache, "_write", token_cache._write.__wrapped__)  # the tests' own keeps entries
    few, many = most_memory(tmp_path, 500), most_memory(tmp_path, 1_500)
    most, left = ((b - a) / 1_000 for a, b in zip(few, many, strict=True))
    assert most < 800 and left < 200, (most, left)


# Digests change with whatever a run would train on otherwise, and with nothing else


def changed(example: Example) -> list[Example]:
    """The example with another token of a prompt, of a completion, a token less, one from the prompt to the
    completion, other tokens that count, another label."""
    row = example.rows[0]
    first, more = row.prompt_ids[:-1], np.concatenate([row.prompt_ids[-1:], row.completion_ids])
    rows = [
        replace(row, prompt_ids=row.prompt_ids + (np.arange(len(row.prompt_ids)) == 0)),
        replace(row, completion_ids=row.completion_ids + 1),
        replace(row, completion_ids=row.completion_ids[:-1]),
        replace(row, prompt_ids=first, completion_ids=more),
        replace(row, loss_mask=np.zeros(len(row.completion_ids), bool)),
    ]
    others = [replace(example, rows=(other, *example.rows[1:])) for other in rows]
    return [*others, replace(example, label=-example.label)]


def test_what_a_run_would_train_on_changes_the_digest() -> None:
    """One example, the order, the number and the bounds of groups; prompts with their reference answers."""
    groups = random_groups(9, seed=1, kind="labelled")
    joined = (groups[0] + groups[1], *groups[2:])
    others = [groups[::-1], groups[:-1], (*groups, groups[-1]), joined]
    others += [(*groups[:4], (one, *groups[4][1:]), *groups[5:]) for one in changed(groups[4][0])]
    assert len({groups_digest(other) for other in (groups, *others)}) == 1 + len(others)
    assert groups_digest(groups) == groups_digest(random_groups(9, seed=1, kind="labelled"))
    prompts = [Prompt((Turn("user", f"{n}+1="),), str(n)) for n in range(4)]
    others = [prompts[::-1], prompts[:3], [*prompts[:3], replace(prompts[3], reference_answer=None)]]
    assert len({prompts_digest(other) for other in (prompts, *others)}) == 4
