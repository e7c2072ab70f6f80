"""Folders of models that are damaged, incomplete, quantised, adapters, or not what config.json says."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from common.errors import ConfigError
from models.export import export, full_state
from models.policy import causal_lm
from models.pretrained import check_model, check_weights, export_dtype, load_policy
from models.weight_files import check_named, check_positions
from tests.tiny import tiny_llama
from tests.unit.models.test_policy import CPU, settings, tokenizer

FILE = "model.safetensors"
State = dict[str, torch.Tensor]


def model(folder: Path, tied: bool = False, change=lambda state: state, **config) -> Path:
    tiny_llama(tied=tied).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    save_file(change(load_file(folder / FILE)), folder / FILE, metadata={"format": "pt"})
    known = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(known | config))
    return folder


DAMAGE = {
    "cut": lambda data: data[:-1],
    "pointer": lambda data: b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 7\n",
    "length": lambda data: struct.pack("<Q", 1 << 62) + data[8:],
    "nested": lambda data: struct.pack("<Q", 200_000) + b"[" * 200_000 + data,
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_file_is_named_from_its_header(tmp_path, how):
    file = model(tmp_path) / FILE
    check_named(settings(tmp_path))
    file.write_bytes(DAMAGE[how](file.read_bytes()))
    why = "the pointer of Git LFS" if how == "pointer" else "cut, damaged"
    for check in (check_named, lambda config: load_policy(config, CPU)):
        with pytest.raises(ConfigError, match=rf"^model.name_or_path={tmp_path}: {file} is {why}") as said:
            check(settings(tmp_path))
        assert "\n" not in str(said.value)


def test_files_of_an_index_are_all_there_and_hold_what_it_says(tmp_path):
    tiny_llama().save_pretrained(tmp_path, max_shard_size="20KB")
    check_named(settings(tmp_path))
    index = tmp_path / f"{FILE}.index.json"
    known = json.loads(index.read_text())
    names = sorted(set(known["weight_map"].values()))
    wrong = [{"model.norm.weight": names[0]}, {"more": names[0]}, {"model.norm.weight": "../x"}]
    texts = {json.dumps({"weight_map": known["weight_map"] | c}): rf".*{next(iter(c))}" for c in wrong}
    for text, said in (texts | dict.fromkeys(("{", "[]", "{}", "[" * 100_000), "is damaged")).items():
        index.write_text(text)
        with pytest.raises(ConfigError, match=f"{index} {said}"):
            check_named(settings(tmp_path))
    index.write_text(json.dumps(known))
    (tmp_path / names[-1]).unlink()
    with pytest.raises(ConfigError, match=rf"{index} names \d+ files, of which 1 are missing: {names[-1]}"):
        load_policy(settings(tmp_path), CPU)


def without(part: str, **more: torch.Tensor) -> Callable[[State], State]:
    """Tensors whose name has ``part`` are gone, and others are there: ``score`` for score.weight."""
    there = {f"{name}.weight": tensor for name, tensor in more.items()}
    return lambda state: {name: tensor for name, tensor in state.items() if part not in name} | there


NORM = "model.norm.weight"
OTHERS = {
    "one is missing": (
        without("0.mlp.down"),
        r"files lack 1 tensor \(model.layers.0.mlp.down_proj.weight\), which would be drawn at random; copy",
    ),
    "one more": (
        without("nothing", summary=torch.zeros(1, 32)),
        r"files hold 1 tensor \(summary.weight\), which the model does not have",
    ),
    "no head": (
        without("lm_head"),
        r'lack 1 tensor \(lm_head.weight\).*write "tie_word_embeddings": true in config.json',
    ),
    "a reward model": (
        without("lm_head", score=torch.zeros(1, 32)),
        r"hold 1 tensor \(score.weight\), .* a reward model's, .*: give the model that it was trained from",
    ),
    "another shape": (
        lambda state: state | {NORM: torch.ones(31)},
        r"hold model.norm.weight of shape \[31\], and config.json makes it \[32\]",
    ),
    "fp8": (
        lambda state: state | {NORM: torch.ones(32).to(torch.float8_e4m3fn)},
        r"stored quantised \(its files hold model.norm.weight\).*give the model as it was before",
    ),
}


@pytest.mark.parametrize("how", OTHERS)
def test_other_tensors_than_the_models_are_named_before_and_while_they_load(tmp_path, how):
    change, said = OTHERS[how]
    config = settings(model(tmp_path, change=change))
    for load in (lambda: check_weights(config, check_model(config)), lambda: load_policy(config, CPU)):
        with pytest.raises(ConfigError, match=said):
            load()


@pytest.mark.parametrize("about", [{"quant_method": "awq", "bits": 4}, {"load_in_4bit": True}])
def test_a_config_of_quantised_weights_is_refused(tmp_path, about):
    for config in ({"quantization_config": about}, {"text_config": {"quantization_config": about}}):
        model(tmp_path, **config)
        with pytest.raises(ConfigError, match="is stored quantised"):
            check_named(settings(tmp_path))


@pytest.mark.parametrize(
    ("rope", "positions"),
    [
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}, 128),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}, 64),
        ({"rope_type": "linear", "factor": 2}, 128),
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 32}, 64),
        (None, 64),
    ],
)
def test_positions_are_those_of_the_scaled_rotary_embeddings(rope, positions):
    fields = {"max_position_embeddings": 64, "rope_scaling": rope}
    check_positions(settings("m", max_length=positions, max_prompt_length=8), fields)
    with pytest.raises(ConfigError, match=f"has {positions} positions"):
        check_positions(settings("m", max_length=positions + 1, max_prompt_length=8), fields)
    for factor in (-1.0, None, "4"):
        with pytest.raises(ConfigError, match=r"rope_scaling\.factor"):
            check_positions(settings("m"), fields | {"rope_scaling": {"type": "yarn", "factor": factor}})


@pytest.mark.parametrize(("field", "value"), [("hidden_act", "nope"), ("num_hidden_layers", "x")])
def test_the_field_of_a_config_that_no_model_can_be_built_with_is_named(tmp_path, field, value):
    config = settings(model(tmp_path, **{field: value}))
    with pytest.raises(ConfigError, match=re.escape(f"its config.json says {field}={value!r}, and no model")):
        check_weights(config, check_model(config))


@pytest.mark.parametrize("field", ["num_hidden_layers", "hidden_size"])
def test_a_size_that_the_files_have_no_room_for_is_refused_at_once(tmp_path, field):
    model(tmp_path, **{field: 10_000_000})
    with pytest.raises(ConfigError, match=f"config.json says {field}=10000000, and its files hold"):
        check_named(settings(tmp_path))


@pytest.mark.parametrize("content", ["{", "7", "[" * 100_000])
def test_a_config_that_is_none_is_one_message(tmp_path, content):
    config = settings(model(tmp_path))
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"^model.name_or_path="):
        load_policy(config, CPU)
    with pytest.raises(ConfigError, match=f"{tmp_path}/config.json is damaged"):
        check_named(config)


def test_an_adapter_says_the_line_that_merges_it(tmp_path):
    base, folder = model(tmp_path / "base"), tmp_path / "adapter"
    loaded = AutoModelForCausalLM.from_pretrained(base)
    adapted = get_peft_model(loaded, LoraConfig(r=2, task_type="CAUSAL_LM"))
    torch.nn.init.normal_(adapted.base_model.model.model.layers[0].self_attn.q_proj.lora_B.default.weight)
    adapted.save_pretrained(folder)
    for beside in (False, True):
        if beside:  # transformers would train the base and not the model that lies there
            model(folder)
        for check in (check_model, check_named):
            with pytest.raises(ConfigError, match=f"is an adapter of {base}: merge it with") as said:
                check(settings(folder))
        assert beside == ("move it away" in str(said.value))
    exec(str(said.value).split('python -c "')[1].split('"')[0])
    merged = load_policy(settings(tmp_path / "adapter-merged"), CPU)
    want = adapted.merge_and_unload().state_dict()
    assert all(torch.equal(tensor, want[name]) for name, tensor in full_state(merged).items())


@pytest.mark.parametrize("stored", ["float32", "float16"])
def test_a_model_is_exported_in_the_dtype_of_its_files_whatever_its_config_says(tmp_path, stored):
    dtype = getattr(torch, stored)
    for said in (None, "bfloat16", "float32"):
        model(tmp_path, change=lambda state: {k: v.to(dtype) for k, v in state.items()}, dtype=said)
        assert export_dtype(settings(tmp_path)) == dtype


def test_what_is_tied_is_what_the_files_say(tmp_path, capsys):
    config = settings(model(tmp_path / "base", tie_word_embeddings=True))
    policy = load_policy(config, CPU)
    assert "the files hold two matrices that differ" in capsys.readouterr().out
    export(full_state(policy), policy, tokenizer(), tmp_path / "out", torch.float32)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False
    written, given = (load_file(tmp_path / name / FILE) for name in ("out", "base"))
    assert written.keys() == given.keys() and all(torch.equal(written[name], given[name]) for name in given)
    twice = {"change": lambda state: state | {TWO[1]: state[TWO[0]].clone()}}  # two copies of one matrix
    tied = load_policy(settings(model(tmp_path / "same", tie_word_embeddings=True, **twice)), CPU)
    assert len({id(causal_lm(tied.model).get_parameter(name)) for name in TWO}) == 1


TWO = ("model.embed_tokens.weight", "lm_head.weight")
