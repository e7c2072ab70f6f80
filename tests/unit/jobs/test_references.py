"""A reward that compares with reference answers is refused, before weights load, where prompts have none."""

from __future__ import annotations

import json
import re

import pytest

from common.errors import ConfigError
from data.chat import make_renderer
from data.sources import load_splits
from jobs.online import make_online_plan
from jobs.preflight import LoadedData
from models.pretrained import load_tokenizer
from tests.tiny import make_config
from trainers.grpo import GRPOTrainer


def planned(tmp_path, with_reference, of, *words):
    path = tmp_path / "prompts.jsonl"
    lines = [{"prompt": f"{i}+1="} | ({"reference": "{}"} if i < with_reference else {}) for i in range(of)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    given = ["loss=grpo", "online=true", "data=local", f"data.path={path}", "data.eval_fraction=0", *words]
    config = make_config(*given, "rounds.contexts=2", "rounds.contexts_per_round=2")
    renderer = make_renderer(load_tokenizer(config.model), config.model, config.data)
    data = LoadedData(*load_splits(config.data), {})
    return len(make_online_plan(config, GRPOTrainer, renderer, data).prompts)


@pytest.mark.parametrize("reward", ["constraints", "adder", "verifier"])
def test_no_prompt_with_a_reference_is_refused(tmp_path, reward):
    with pytest.raises(ConfigError, match=f"reward={reward}: .*data=local has none"):
        planned(tmp_path, 0, 4, f"reward={reward}")


@pytest.mark.parametrize(
    ("with_reference", "reward", "told"),
    [
        (3, "constraints", "1 of 4 prompts of data=local have none, more than reward.max_missing=0:"),
        (9, "verifier", None),
        (17, "adder", "3 of 20 prompts of data=local have none, more than reward.max_missing=0.1:"),
    ],
)
def test_some_prompts_without_a_reference_may_be_as_many_as_verdicts_may_miss(
    tmp_path, with_reference, reward, told
):
    of = {3: 4, 9: 10, 17: 20}[with_reference]
    if told is None:
        assert planned(tmp_path, with_reference, of, f"reward={reward}") == of
    else:
        with pytest.raises(ConfigError, match=re.escape(told)):
            planned(tmp_path, with_reference, of, f"reward={reward}")


def test_a_round_has_no_more_contexts_than_there_are_prompts(tmp_path):
    with pytest.raises(ConfigError, match="has 1 prompts to sample, and none comes twice"):
        planned(tmp_path, 1, 1, "reward=adder")


def test_a_function_may_score_a_prompt_without_a_reference(tmp_path):
    words = ["reward=function", "reward.function.path=rollouts.rewards.function.adder"]
    assert planned(tmp_path, 1, 4, *words) == 4
