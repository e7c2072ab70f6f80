"""What is refused of the plan before weights load."""

from __future__ import annotations

import pytest

from common.errors import ConfigError
from data.batches import Segment
from tests.tiny import make_config, random_groups
from trainers.assembly import check_budget


def test_an_example_above_the_token_budget_is_refused_by_its_prompt():
    groups = random_groups(9)
    longest = max((e for group in groups for e in group), key=lambda e: sum(map(len, e.rows)))
    tokens, plan = sum(map(len, longest.rows)), Segment(groups, 4, 9, 0)
    check_budget(make_config(f"model.microbatch_tokens={tokens}"), plan)
    check_budget(make_config(), plan)
    with pytest.raises(ConfigError) as error:
        check_budget(make_config(f"model.microbatch_tokens={tokens - 1}"), plan)
    assert error.value.key == "model.microbatch_tokens"
    assert longest.prompt_id in str(error.value) and f"{tokens} tokens" in str(error.value)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        (["model.microbatch_tokens=0"], "model.microbatch_tokens"),
        (
            ["model.microbatch_tokens=99", "model.microbatches=2"],
            "model.microbatches",
        ),
    ],
)
def test_budgets_that_say_nothing_are_refused(settings, key):
    with pytest.raises(ConfigError) as error:
        make_config(*settings)
    assert error.value.key == key
