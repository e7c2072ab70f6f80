"""What is refused of a loss's numbers and of the plan before weights load."""

from __future__ import annotations

import dataclasses
import inspect
import re
from contextlib import nullcontext

import pytest

from common.errors import ConfigError
from data.batches import Segment, Tokens, deal
from data.types import Example
from tests.tiny import make_config, random_groups
from trainers import assembly
from trainers.assembly import check_budget


@pytest.mark.parametrize("packed", [True, False])
def test_an_example_above_the_token_budget_is_refused_by_its_prompt(packed):
    """Padded to its longest row where rows are not packed: a budget that passes is one that can be dealt."""
    groups = random_groups(9)
    examples = [example for group in groups for example in group]

    def width(example: Example) -> int:
        lengths = list(map(len, example.rows))
        return sum(lengths) if packed else len(lengths) * max(lengths)

    longest = max(examples, key=width)
    tokens, plan = width(longest), Segment(groups, 4, 9, 0)
    assert packed or tokens > max(sum(map(len, e.rows)) for e in examples)
    check_budget(make_config(f"model.microbatch_tokens={tokens}"), plan, packed)
    check_budget(make_config(), plan, packed)
    deal(examples, 2, Tokens(tokens), 2, packed)
    with pytest.raises(ConfigError) as error:
        check_budget(make_config(f"model.microbatch_tokens={tokens - 1}"), plan, packed)
    assert error.value.key == "model.microbatch_tokens"
    assert longest.prompt_id in str(error.value) and f"{tokens} tokens" in str(error.value)
    with pytest.raises(ValueError, match="tokens"):
        deal(examples, 2, Tokens(tokens - 1), 2, packed)


def test_a_budget_beside_a_count_is_refused():
    with pytest.raises(ConfigError, match=r"^model\.microbatches=2"):
        make_config("model.microbatch_tokens=99", "model.microbatches=2")


@pytest.mark.parametrize("future", ["from __future__ import annotations", ""])
def test_the_numbers_of_a_users_loss_are_typed_however_it_is_annotated(future):
    module: dict[str, object] = {}
    exec(f"{future}\ndef mine(scores, *, beta: float, kind: str | None = None): ...", module)
    signature = inspect.signature(module["mine"])
    config = make_config("loss=dpo")
    for numbers, message in (
        ({"beta": 0.1, "kind": "a"}, None),
        ({"beta": "0.1"}, "loss.beta=0.1: must be a number"),
        ({"beta": 0.1, "kind": 2}, "loss.kind=2: must be a text"),
        ({}, "loss.beta=???: loss=mine needs it"),
        ({"beta": 0.1, "tau": 1}, "loss.tau=1: loss=mine does not take it; it takes beta, kind"),
    ):
        loss = {"name": "mine", "_target_": "a.b"} | numbers
        with nullcontext() if message is None else pytest.raises(ConfigError, match=re.escape(message)):
            assembly.check_numbers(dataclasses.replace(config, loss=loss), numbers, signature)
