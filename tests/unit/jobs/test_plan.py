"""The data of a run: sampled token ids reach the model only if they are its own, and a reward that compares
with reference answers is refused, before weights load, where prompts have none."""

from __future__ import annotations

import json
import re

import pytest

from common.errors import ConfigError, DataError
from data.chat import make_renderer, vocabulary_fingerprint
from data.sources import load_splits
from jobs.online import make_online_plan
from jobs.plan import check_data
from jobs.preflight import LoadedData
from models.pretrained import load_tokenizer
from tests.tiny import make_config
from trainers.grpo import GRPOTrainer


@pytest.fixture(scope="module")
def run():
    """What every case has: the embedded model's renderer and its tokenizer's fingerprint."""
    config = make_config()
    tokenizer = load_tokenizer(config.model)
    return make_renderer(tokenizer, config.model, config.data), vocabulary_fingerprint(tokenizer)


def loaded(tmp_path, renderer, ids, *settings, tokenizer=None):
    path = tmp_path / "groups.jsonl"
    sampled = {"text": "2", "token_ids": ids} | ({} if tokenizer is None else {"tokenizer": tokenizer})
    line = {"prompt": "1+1=", "completions": [sampled, "3"], "rewards": [1, 0]}
    path.write_text(json.dumps(line) + "\n" + json.dumps(line | {"prompt": "2+1="}) + "\n")
    given = settings or ("data.eval_fraction=0", "~reward")
    config = make_config("data=local", f"data.path={path}", *given)
    data = LoadedData(*load_splits(config.data), {})
    check_data(config, data, renderer)
    return data.train


def test_ids_are_checked_by_fingerprint_or_by_the_size_of_the_vocabulary(tmp_path, run):
    renderer, ours = run
    size = len(renderer.tokenizer)
    for tokenizer in (None, ours):
        train = loaded(tmp_path, renderer, [size - 1], tokenizer=tokenizer)
        assert train.groups[0].completions[0].token_ids == (size - 1,)
        with pytest.raises(DataError, match=f"groups.jsonl, row 1: the token id {size}"):
            loaded(tmp_path, renderer, [size], tokenizer=tokenizer)
    with pytest.raises(DataError, match=f"of another tokenizer .*{ours}"):
        loaded(tmp_path, renderer, [1], tokenizer="f" * 16)


def test_evaluation_data_are_checked_too_and_online_training_reads_prompts_alone(tmp_path, run):
    renderer, _ = run
    online = ["online=true", "reward=adder"]
    with pytest.raises(DataError, match="another tokenizer"):
        loaded(tmp_path, renderer, [1], *online, tokenizer="f" * 16)
    train = loaded(tmp_path, renderer, [1], *online, "data.eval_fraction=0", tokenizer="f" * 16)
    assert len(train.groups) == 2


ADDER = ["reward=function", "reward.function.path=rollouts.rewards.function.adder"]


@pytest.mark.parametrize(
    ("with_reference", "of", "reward", "told"),
    [
        *((0, 4, f"reward={name}", f"reward={name}: ") for name in ("constraints", "adder", "verifier")),
        (9, 10, "reward=verifier", None),
        (0, 4, "reward=verifier reward.max_missing=1", "4 of 4 prompts of data=local have none"),
        (17, 20, "reward=adder", "3 of 20 prompts of data=local have none (reward.max_missing=0.1):"),
        (1, 1, "reward=adder", "has 1 prompts to sample, and none comes twice"),
        (1, 4, " ".join(ADDER), None),  # a function may score a prompt without one
    ],
)
def test_a_round_has_prompts_whose_answers_can_be_compared(tmp_path, run, with_reference, of, reward, told):
    """As few without a reference as verdicts may miss."""
    path = tmp_path / "prompts.jsonl"
    lines = [{"prompt": f"{i}+1="} | ({"reference": "{}"} if i < with_reference else {}) for i in range(of)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ["loss=grpo", "online=true", "data=local", f"data.path={path}", "data.eval_fraction=0"]
    words += ["rounds.contexts=2", "rounds.contexts_per_round=2", *reward.split()]
    config = make_config(*words)
    data = LoadedData(*load_splits(config.data), {})
    if told is None:
        assert len(make_online_plan(config, GRPOTrainer, run[0], data).prompts) == of
        return
    with pytest.raises(ConfigError, match=re.escape(told)):
        make_online_plan(config, GRPOTrainer, run[0], data)
