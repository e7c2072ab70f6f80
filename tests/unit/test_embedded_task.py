"""The embedded task's model, data and settings come with nothing of one's own, unless they are asked for."""

from __future__ import annotations

import json
import shutil

import pytest

from common.errors import ConfigError
from config.cli import compose
from config.load import dump
from tests.tiny import ROOT, make_config
from tests.unit.data.people import lines
from train import train

EMBEDDED = ROOT / "assets" / "adder" / "model"
WORDS = [
    "data=local data.path={own}/pairs.jsonl",
    "data=local data.path={own}/prompts.jsonl online=true reward=adder data.eval_fraction=0 "
    "rounds.contexts_per_round=2",
]


@pytest.mark.parametrize("line", WORDS)
def test_the_embedded_model_is_not_trained_on_words(tmp_path, line):
    pair = {"prompt": "What is the capital of {}?", "chosen": "It is {}.", "rejected": "Who knows."}
    rows = [{key: text.format(i) for key, text in pair.items()} for i in "abcdefgh"]
    lines(tmp_path / "pairs.jsonl", rows)
    lines(tmp_path / "prompts.jsonl", ({"prompt": row["prompt"]} for row in rows))
    with pytest.raises(ConfigError, match=r"tokenizer does not know .*; choose a model .* model=hub"):
        train(make_config(*line.format(own=tmp_path).split(), "dry_run=true"), "run")


def test_the_embedded_models_settings_are_not_another_models(tmp_path):
    shutil.copytree(EMBEDDED, tmp_path / "mine")
    path = tmp_path / "mine" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"vocab_size": 32000}))
    with pytest.raises(ConfigError, match=rf"type model=hub model.name_or_path={tmp_path}/mine$"):
        train(make_config(f"model.name_or_path={tmp_path}/mine", "dry_run=true"), "run")
    shutil.copytree(EMBEDDED, tmp_path / "trained")  # one that was trained on from it is the same task
    train(make_config(f"model.name_or_path={tmp_path}/trained", "dry_run=true"), "run")


def test_a_model_of_ones_own_is_not_trained_on_sums_by_default():
    said = r"model=hub is another model; give data=local .* or type data=adder"
    for words in ([], ["data.eval_fraction=0.5"]):
        with pytest.raises(ConfigError, match=said):
            compose("model=hub", "model.name_or_path=org/name", *words)


def test_a_runs_folder_as_a_model_brings_its_lengths(tmp_path):
    run = make_config("model.max_length=48", "model.max_prompt_length=12")
    (tmp_path / "model").mkdir()
    (tmp_path / "config.yaml").write_text(dump(run))
    for path in (tmp_path, tmp_path / "model"):
        found = make_config("model=hub", f"model.name_or_path={path}").model
        assert (found.max_length, found.max_prompt_length) == (48, 12)
    own = make_config("model=hub", f"model.name_or_path={tmp_path}", "model.max_length=50").model
    assert (own.max_length, own.max_prompt_length) == (50, 12)
    elsewhere = make_config("model=hub", "model.name_or_path=org/name").model
    assert (elsewhere.max_length, elsewhere.max_prompt_length) == (2048, 1024)
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "config.yaml").write_text("model: [")
    assert make_config("model=hub", f"model.name_or_path={tmp_path}/torn").model.max_length == 2048
    with pytest.raises(ConfigError, match=r"model.name_or_path=\?\?\?: has no default"):
        make_config("model=hub")
