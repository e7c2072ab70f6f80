"""What is refused of the plan before weights load."""

from __future__ import annotations

import pytest

from common.errors import ConfigError
from data.batches import Segment, Tokens, deal
from data.types import Example
from tests.tiny import make_config, random_groups
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


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        (["model.microbatch_tokens=0"], "model.microbatch_tokens"),
        (["model.microbatch_tokens=99", "model.microbatches=2"], "model.microbatches"),
    ],
)
def test_budgets_that_say_nothing_are_refused(settings, key):
    with pytest.raises(ConfigError) as error:
        make_config(*settings)
    assert error.value.key == key
