"""The data of a run: sampled token ids reach the model only if they are its own."""

from __future__ import annotations

import json

import pytest

from common.errors import DataError
from data.chat import make_renderer, vocabulary_fingerprint
from data.sources import load_splits
from jobs.plan import check_data
from jobs.preflight import LoadedData
from models.pretrained import load_tokenizer
from tests.tiny import make_config


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
