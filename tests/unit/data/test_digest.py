"""The digest of training data changes with whatever a run would train on otherwise, and with nothing else."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from data.examples import groups_digest, prompts_digest
from data.types import Example, Prompt, Turn
from tests.tiny import random_groups


def changed(example: Example, what: str) -> Example:
    row = example.rows[0]
    other = {
        "a prompt's token": replace(row, prompt_ids=row.prompt_ids + (np.arange(len(row.prompt_ids)) == 0)),
        "a completion's token": replace(row, completion_ids=row.completion_ids + 1),
        "a token less": replace(row, completion_ids=row.completion_ids[:-1]),
        "a token from the prompt to the completion": replace(
            row,
            prompt_ids=row.prompt_ids[:-1],
            completion_ids=np.concatenate([row.prompt_ids[-1:], row.completion_ids]),
        ),
        "the tokens that count": replace(row, loss_mask=np.zeros(len(row.completion_ids), bool)),
    }
    if what == "its label":
        return replace(example, label=-example.label)
    return replace(example, rows=(other[what], *example.rows[1:]))


EXAMPLE = ["a prompt's token", "a completion's token", "a token less", "the tokens that count", "its label"]


@pytest.mark.parametrize("what", [*EXAMPLE, "a token from the prompt to the completion"])
def test_one_example_that_is_changed_changes_the_digest(what: str) -> None:
    groups = list(random_groups(9, seed=1, kind="labelled"))
    before = groups_digest(groups)
    groups[4] = (changed(groups[4][0], what), *groups[4][1:])
    assert groups_digest(groups) != before == groups_digest(random_groups(9, seed=1, kind="labelled"))


def test_the_order_the_number_and_the_bounds_of_groups_count() -> None:
    groups = random_groups(9, seed=1, kind="labelled")
    joined = (groups[0] + groups[1], *groups[2:])
    others = [groups[::-1], groups[:-1], (*groups, groups[-1]), joined]
    assert len({groups_digest(other) for other in (groups, *others)}) == 5


def test_prompts_count_with_their_order_and_their_reference_answers() -> None:
    prompts = [Prompt((Turn("user", f"{n}+1="),), str(n)) for n in range(4)]
    others = [prompts[::-1], prompts[:3], [*prompts[:3], replace(prompts[3], reference_answer=None)]]
    assert len({prompts_digest(other) for other in (prompts, *others)}) == 4
