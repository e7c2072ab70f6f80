"""Adapters by themselves: what is written of them, and what noise on them does."""

from __future__ import annotations

import json

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from models.adapters import (
    WEIGHTS,
    adapted_modules,
    adapter_folder,
    adapter_state,
    export_adapters,
    perturbed,
)
from tests.tiny import tiny_policy
from tests.unit.models.test_lora import load, model_of, perturb
from tests.unit.models.test_policy import batch

LINEAR = ("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj")


def written(policy, tmp_path, dtype=torch.float32):
    export_adapters(adapter_state(policy), policy, tmp_path / "base", tmp_path / "adapters", dtype)
    return tmp_path / "adapters"


def test_what_is_written_makes_the_policy_of_its_base_and_is_adapters_alone(tmp_path):
    policy = load(tmp_path / "base")
    perturb(policy)
    folder = written(policy, tmp_path)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    rows = batch()
    wanted = policy(rows)
    policy.model = PeftModel.from_pretrained(base, folder).eval()
    assert torch.equal(policy(rows), wanted)
    policy.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    assert torch.equal(policy(rows), wanted)  # as transformers loads it
    tensors = load_file(folder / WEIGHTS)
    assert all(".lora_" in name and name.endswith(".weight") for name in tensors)
    assert not list(tmp_path.glob(".*")), "written whole, then renamed"


def test_a_folder_says_its_base_its_rank_and_where_its_adapters_are(tmp_path):
    found = adapter_folder(written(load(tmp_path / "base"), tmp_path))
    assert found is not None
    assert (found.base, found.rank, found.modules) == (str(tmp_path / "base"), 4, LINEAR)
    assert adapter_folder(tmp_path / "base") is None
    assert load_file(tmp_path / "adapters" / WEIGHTS)
    config = json.loads((tmp_path / "adapters/adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (4, 12)


@pytest.mark.parametrize("target", ["all-linear", ["q_proj", "down_proj"]])
def test_where_adapters_will_be_is_known_before_weights_load(tmp_path, target):
    config = model_of(tmp_path / "base", target_modules=target)
    found = adapted_modules(config)
    assert found == adapter_folder(written(load(tmp_path / "base", target_modules=target), tmp_path)).modules
    assert found == (LINEAR if target == "all-linear" else ("down_proj", "q_proj"))


def test_noise_shows_that_adapters_are_read_and_leaves_no_trace(tmp_path):
    policy = load(tmp_path / "base")
    before = {name: p.detach().clone() for name, p in policy.named_parameters()}
    plain = policy(batch())
    assert torch.equal(plain, tiny_policy()(batch())), "fresh adapters show nothing"
    with perturbed(policy):
        noisy = policy(batch())
        state = adapter_state(policy)
    difference = (noisy - plain).detach().abs()
    assert 0.05 < float(difference.mean()) < 3.0, "above bfloat16's rounding, and still a language model's"
    assert all(tensor.any() for tensor in state.values())
    assert all(torch.equal(p, before[name]) for name, p in policy.named_parameters())
    with perturbed(policy):
        assert torch.equal(policy(batch()), noisy), "the same noise, so that replicas have the same"
    for module in LINEAR:  # each of them is missed where it is left out
        with perturbed(policy):
            for name, parameter in policy.named_parameters():
                if f"{module}.lora_B" in name:
                    parameter.data.zero_()
            assert float((policy(batch()) - noisy).abs().mean()) > 1e-3, module
