"""Examples that are made when they are asked for are those that were held before: from a file of token ids
and from memory, of any groups."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from data import views
from data.balance import share_tokens
from data.examples import (
    Examples,
    columns_of,
    groups_digest,
    longest,
    make_examples,
    picked_groups,
    prompts_digest,
    with_tokens,
)
from data.token_cache import TokenCache
from data.types import Completion, Example, Group, Prompt, Turn
from tests.tiny import random_groups
from tests.unit.data.test_token_cache import groups, plain, renderer

REWARDS = ((1.0, -1.0), (0.0, 0.5), (1.0, 1.0), (0.0,), (1.0,), ())


def varied() -> list[Group]:
    """Groups of two, one and no answer, of different and of equal rewards."""
    pairs = zip(groups(48), itertools.cycle(REWARDS), strict=False)
    return [replace(of, completions=of.completions[: len(to)], rewards=to) for of, to in pairs]


def same(made: Examples, want: Examples) -> None:
    assert list(made.dropped.items()) == list(want.dropped.items())
    assert plain(made.groups) == plain(want.groups) and len(made.groups) == len(want.groups)
    assert made.count == want.count == sum(map(len, want.groups))
    ours, theirs = columns_of(made.groups), columns_of(want.groups)
    for name, values in vars(theirs).items():
        assert getattr(ours, name).tolist() == values.tolist(), name
    assert ours.signs.tolist() == theirs.signs.tolist()
    for packed in (True, False) if want.groups else ():
        most = longest(made.groups, packed)
        assert plain([[most]]) == plain([[longest(want.groups, packed)]])
        shares = [share_tokens([example], packed) for group in want.groups for example in group]
        assert share_tokens([most], packed) == max(shares)


@pytest.mark.parametrize("view", [views.pairs, views.labelled, views.group_advantages, views.demonstrations])
def test_a_table_gives_what_would_be_held(tmp_path, view):
    """Held are the rows of each group as they are tokenised one by one; why others have none is counted."""
    wanted = varied()
    want, of = make_examples(wanted, view, renderer()), renderer()
    held = []
    for group in wanted:
        answers = [group.completions[i] for spec in view(group) for i in spec.completions]
        rows = [with_tokens(of.sequence(group.prompt, answer), answer) for answer in answers]
        if rows and not any(isinstance(row, str) for row in rows):
            held.append(Example("", tuple(rows)))
    found = [Example("", tuple(row for e in group for row in e.rows)) for group in want.groups]
    assert plain([found]) == plain([held])
    assert len(want.groups) + sum(want.dropped.values()) == len(wanted)
    cache = TokenCache(tmp_path, worth=1)
    for made in (make_examples(wanted, view, renderer(), cache) for _ in range(2)):  # written, then read
        same(made, want)
    assert groups_digest(made.groups) == groups_digest(want.groups), "wherever the rows are"
    order = np.random.default_rng(len(wanted)).permutation(len(want.groups))
    assert plain(picked_groups(made.groups, order)) == plain([want.groups[i] for i in order])
    assert plain(made.groups[1:]) == plain(want.groups[1:])


def test_an_added_end_token_has_no_log_mu_and_counts() -> None:
    known, mask = (-1.0, -2.0), (True, False)
    sampled = Completion("yes", (5, 6), behavior_logprobs=known, loss_mask=mask)
    row = with_tokens(renderer().sequence(Prompt((Turn("user", "a"),)), sampled), sampled)
    assert len(row.completion_ids) == 3 and row.loss_mask.tolist() == [True, False, True]
    assert row.behavior_logprobs[:2].tolist() == [*known] and np.isnan(row.behavior_logprobs[2])


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
