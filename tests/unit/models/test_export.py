"""Weights that go over one by one are those that would be written: names, values and dtype."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModelForSequenceClassification, GenerationConfig

from models.export import config_json, export, full_state, whole_folder, whole_weights
from models.policy import Policy
from models.pretrained import check_model, check_weights, load_policy
from tests.tiny import tiny_llama
from tests.unit.models.test_families import FAMILIES, tiny
from tests.unit.models.test_lora import load, perturb
from tests.unit.models.test_policy import CPU, settings, tokenizer


def stored(policy: Policy, folder, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    export(full_state(policy), policy, tokenizer(), folder, dtype)
    return load_file(folder / "model.safetensors")


def assert_same(policy: Policy, folder, dtype: torch.dtype) -> None:
    """What is there twice is tied."""
    wanted, given = stored(policy, folder, dtype), dict(whole_weights(policy, dtype))
    assert json.loads(config_json(policy, dtype)) == json.loads((folder / "config.json").read_text())
    for name, tensor in wanted.items():
        assert given[name].dtype == tensor.dtype == dtype and torch.equal(given[name], tensor), name
    for name in given.keys() - wanted.keys():
        assert any(torch.equal(given[name], tensor) for tensor in wanted.values()), name


@pytest.mark.parametrize("family", FAMILIES)
def test_every_architectures_weights_come_as_its_checkpoints_have_them(tmp_path, family):
    """And none of them would be refused."""
    assert_same(tiny(family), tmp_path, torch.bfloat16)
    kernel = FAMILIES[family]._attn_implementation or "sdpa"
    config = settings(tmp_path, max_length=60, max_prompt_length=30, attn_implementation=kernel)
    assert check_weights(config, check_model(config)) == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_come_merged(tmp_path, dtype):
    policy = load(tmp_path / "base", dtype)
    perturb(policy)
    assert_same(policy, tmp_path / "model", torch.float32)
    assert not any("lora" in name for name, _ in whole_weights(policy, torch.float32))


def write(folder: Path, text: str) -> None:
    folder.mkdir()
    (folder / "weights").write_text(text)


def what_lies_in(folder: Path) -> dict[str, str]:
    return {path.name: (path / "weights").read_text() for path in folder.iterdir()}


def test_an_export_that_fails_or_is_killed_leaves_the_old_one_and_the_next_removes_what_it_left(tmp_path):
    """And nothing else."""
    folder, dead, living = tmp_path / "model", 2**22 + 1, os.getppid()
    others = [f".model-{dead}.zip", ".model-mine.part", f".models-{dead}.part", f".model-{living}.part"]
    for name in ("model", *others):
        write(tmp_path / name, "old")
    with pytest.raises(FileNotFoundError), whole_folder(folder):
        pass  # nothing was written
    assert what_lies_in(tmp_path) == dict.fromkeys(("model", *others), "old")
    if (child := os.fork()) == 0:
        with whole_folder(folder) as part:
            write(part, "half")
            os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    assert what_lies_in(tmp_path)["model"] == "old"
    write(tmp_path / f".model-{os.getpid()}.old", "left")
    with whole_folder(folder) as part:
        write(part, "new")
    assert what_lies_in(tmp_path) == dict.fromkeys(others, "old") | {"model": "new"}


def test_what_is_exported_stops_where_the_training_template_stops(tmp_path):
    policy = load(tmp_path / "base")
    model = policy.model.get_base_model()
    for there, stops, wanted in (
        (1, (5, 1), [1, 5]),
        ([1, 5], (5, 1), [1, 5]),
        (None, (5,), 5),
        (1, (1,), 1),
    ):
        model.config.eos_token_id = model.generation_config.eos_token_id = there
        export(full_state(policy), policy, tokenizer(), tmp_path / "out", torch.float32, stops)
        for kind in (AutoConfig, GenerationConfig):
            assert kind.from_pretrained(tmp_path / "out").eos_token_id == wanted
        assert model.config.eos_token_id == model.generation_config.eos_token_id == there


def test_what_cannot_be_saved_does_not_lose_the_weights(tmp_path, capsys):
    policy, words = load(tmp_path / "base"), tokenizer()
    model = policy.model.get_base_model()
    model.generation_config.update(do_sample=False, temperature=0.6, top_p=0.9)  # transformers saves no such
    model.config.temperature = 0.6  # nor this
    words.save_pretrained = lambda folder: words.no_such_method()
    wanted = stored(policy, tmp_path / "model", torch.float32)
    export(full_state(policy), policy, words, tmp_path / "out", torch.float32)
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(written[name], wanted[name]) for name in wanted)
    assert GenerationConfig.from_pretrained(tmp_path / "out").temperature == 0.6
    assert "warning: the model is exported without the tokenizer: AttributeError" in capsys.readouterr().out


@pytest.mark.parametrize("pad", ["w7", None])
def test_transformers_scores_a_padded_batch_with_an_exported_reward_model(tmp_path, pad):
    tiny_llama().save_pretrained(tmp_path / "base")
    policy = load_policy(settings(tmp_path / "base", head="reward"), CPU)
    words = tokenizer(pad_token=pad) if pad else tokenizer()
    if pad is None:
        words.pad_token_id = None
    export(full_state(policy), policy, words, tmp_path / "out", torch.float32, (1,))
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    rows = [torch.tensor([3, 4, 1]), torch.tensor([3, 4, 5, 6, 1])]
    assert model.config.pad_token_id == (7 if pad else None)
    model.config.pad_token_id = 7 if pad else 0  # as the model's card says
    padded = pad_sequence(rows, batch_first=True, padding_value=model.config.pad_token_id)
    together = model(padded, attention_mask=(padded != model.config.pad_token_id).long()).logits
    model.config.pad_token_id = None
    alone = torch.cat([model(row[None]).logits for row in rows])
    torch.testing.assert_close(together, alone)
