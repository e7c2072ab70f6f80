"""A base in 4 bits: its numbers, that the model is the one with the rounded weights, what is exported, what
is refused."""

from __future__ import annotations

import copy
import tempfile
import zlib
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from common.errors import ConfigError
from config.schema_model import ModelConfig, PeftConfig
from models.distributed import start
from models.export import export, full_state, whole_weights
from models.policy import Policy, decoder_blocks
from models.pretrained import check_model, check_weights, load_policy
from models.quantization import BLOCK, LEVELS, NF4Linear, pack, quantise, quantised, unpack
from models.shapes import count_weights
from models.sharding import shard
from tests.integration import test_two_models
from tests.tiny import tiny_llama
from tests.unit.models.test_families import FAMILIES, MIXTURES
from tests.unit.models.test_families import tiny as tiny_family
from tests.unit.models.test_lora import perturb
from tests.unit.models.test_policy import CPU, batch, settings, tokenizer

WAYS: dict[str, dict[str, Any]] = {
    "bfloat16": {"dtype": "bfloat16"},
    "selective": {"activation_checkpointing": "selective"},
    "some layers have adapters": {"target_modules": ["q_proj", "down_proj"]},
}
TABLE = NF4Linear(nn.Linear(64, 1).requires_grad_(False)).table


def nf4_settings(path: Path | str, quantization: str | None, **more: Any) -> ModelConfig:
    peft = {key: more.pop(key) for key in ("target_modules",) if key in more}
    lora = PeftConfig(lora_r=4, lora_alpha=12, **peft)
    lengths = {"max_length": 64, "max_prompt_length": 32}
    return settings(path, use_peft=True, quantization=quantization, peft=lora, **(lengths | more))


def pair(model: Any, **more: Any) -> tuple[Policy, Policy]:
    """The quantised policy, and one that has its weights as plain ones; adapters alike, and not at their
    start."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        ours, plain = (load_policy(nf4_settings(folder, way, **more), CPU) for way in ("nf4", None))
    for policy in (ours, plain):
        perturb(policy)
    with torch.no_grad():
        for name, layer in quantised(ours.model).items():
            linear = plain.model.get_submodule(name.removesuffix(".packed"))
            assert type(linear) is nn.Linear
            linear.weight.copy_(unpack(layer.packed, layer.table, layer.columns))
    return ours, plain


def assert_equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


# -- numbers ---------------------------------------------------------------------------------------


NUMBERS = {
    (128, 128): 1771494671,
    (64, 1536): 2157168426,
    (33, 64): 2468262287,
}
"""Rows and columns of drawn weights -> the checksum of their bytes, made by the NF4Tensor of torchao 0.18."""


def test_the_numbers_are_torchaos() -> None:
    """To the bit, and each is one of the 16 levels times something near its block's largest weight."""
    torch.manual_seed(0)
    for (rows, columns), wanted in NUMBERS.items():
        weight = torch.randn(rows, columns) * 0.02
        weight[0, :16] = 0
        weight[2], weight[3] = 0.0, 0.5
        packed = pack(weight)
        assert zlib.crc32(packed.numpy().tobytes()) == wanted
        given = unpack(packed, TABLE, columns)
        assert not given[0, :16].any()
        largest = weight.view(-1, BLOCK).abs().amax(-1, keepdim=True)
        error = (given.view(-1, BLOCK) - weight.view(-1, BLOCK)).abs()
        gap = max(b - a for a, b in pairwise(LEVELS))
        spread = (largest - largest.mean()).abs().view(rows, -1).amax(-1).repeat_interleave(columns // BLOCK)
        assert (error <= largest * gap / 2 + spread[:, None] / 127 + 1e-7).all()


# -- the model -------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_it_is_the_model_with_the_rounded_weights(way: str) -> None:
    """Log-probabilities and the adapters' gradients, to the bit; sharded, as it trains."""
    ours, plain = pair(tiny_llama(), **WAYS[way])
    assert len(quantised(ours.model)) == 14  # 7 in each of 2 layers
    assert count_weights(ours.model) == count_weights(plain.model)
    values, gradients = [], []
    for policy in (ours, plain):
        dtype = torch.bfloat16 if way == "bfloat16" else torch.float32
        shard(policy, decoder_blocks(policy), start(), dtype)
        values.append(policy(batch()))
        values[-1].square().sum().backward()
        found = {name: p.grad.full_tensor() for name, p in policy.named_parameters() if p.grad is not None}
        gradients.append(found)
    assert torch.equal(*values) and values[0].any()
    assert gradients[0] and all(g.any() for g in gradients[0].values())
    assert_equal(*gradients)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_exported_is_what_was_trained(tmp_path, dtype: str) -> None:
    """Adapters are merged into the rounded weights, gathered at once or one by one, and what transformers
    loads of it scores as the policy did."""
    ours, plain = pair(tiny_llama(tied=False), dtype=dtype)
    before, state = ours(batch()).detach(), full_state(ours)
    wanted = copy.deepcopy(plain.model).merge_and_unload().state_dict()
    assert_equal(state, full_state(plain))
    one_by_one = [dict(whole_weights(policy, torch.float32)) for policy in (ours, plain)]
    assert_equal(*one_by_one)
    assert state.keys() == wanted.keys() == one_by_one[0].keys()
    if dtype == "float32":
        for name, value in wanted.items():
            torch.testing.assert_close(state[name], value, rtol=1e-6, atol=1e-6)
        export(state, ours, tokenizer(), tmp_path / "out", torch.float32)
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
        torch.testing.assert_close(Policy(loaded)(batch()), before, rtol=1e-4, atol=1e-4)


def test_every_architecture_is_right_or_refused(tmp_path) -> None:
    """Those that the tests know: the refused have experts, which are no linear layers."""
    for family in sorted(FAMILIES.keys() - {"mamba2"}):  # peft has no adapters for its layers
        kernel = {"attn_implementation": FAMILIES[family]._attn_implementation or "sdpa"}
        if family in MIXTURES:
            FAMILIES[family].save_pretrained(tmp_path / family)
            with pytest.raises(ConfigError, match=r"model\.quantization=nf4: .* linear layers.*use off"):
                check_weights(c := nf4_settings(tmp_path / family, "nf4", **kernel), check_model(c))
            continue
        ours, plain = pair(tiny_family(family).model, **kernel)
        assert torch.equal(ours(batch()), plain(batch())), family


# -- runs ------------------------------------------------------------------------------------------


def test_the_reference_is_that_of_a_second_model(tmp_path, monkeypatch) -> None:
    """As for a base that is not quantised: losses of every step and the final weights to the bit, the first
    of them against a policy that is its own reference."""
    plain = test_two_models.make_policy

    def make_policy(lora: bool) -> Policy:
        policy = plain(lora)
        quantise(decoder_blocks(policy))
        return policy

    monkeypatch.setattr(test_two_models, "make_policy", make_policy)
    test_two_models.test_bit_identical_to_a_second_model(tmp_path, "grpo", 3, True)


# -- what is refused -------------------------------------------------------------------------------


def test_a_model_that_cannot_be_quantised_is_refused_before_weights_are_loaded(tmp_path) -> None:
    """There is a folder with a config.json alone."""
    sizes = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaConfig(**sizes, intermediate_size=40).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"model\.quantization=nf4: .*rows of 40 weights.*use off"):
        check_weights(config := nf4_settings(tmp_path, "nf4"), check_model(config))
