"""What is checked of model.quantization=nf4 where torchao is: a worker process for test_quantization.py."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchao.quantization import NF4Tensor
from transformers import AutoModelForCausalLM

from common.errors import ConfigError
from common.worker_process import serve
from config.schema_model import ModelConfig, PeftConfig
from models.checkpoint_reading import read_table
from models.distributed import shard, start
from models.export import export, full_state, whole_weights
from models.fingerprint import weights_fingerprint
from models.policy import Policy, decoder_blocks
from models.pretrained import check_model, load_policy
from models.quantization import BLOCK, LEVELS, NF4Linear, block_length, pack, quantise, quantised, unpack
from tests.integration import test_runs, test_two_models
from tests.tiny import tiny_llama
from tests.unit.models.test_families import FAMILIES, MIXTURES
from tests.unit.models.test_families import tiny as tiny_family
from tests.unit.models.test_lora import perturb
from tests.unit.models.test_policy import CPU, batch, tokenizer

WAYS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "checkpointed": {"activation_checkpointing": True},
    "selective": {"activation_checkpointing": "selective"},
    "some layers have adapters": {"target_modules": ["q_proj", "down_proj"]},
}
TABLE = NF4Linear(nn.Linear(64, 1).requires_grad_(False)).table


@contextmanager
def folder_of(model: Any) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        yield Path(folder)


def settings(path: Path, quantization: str | None, **more: Any) -> ModelConfig:
    peft = {key: more.pop(key) for key in ("target_modules",) if key in more}
    given = {"dtype": "float32", "max_length": 64, "max_prompt_length": 32} | more
    lora = PeftConfig(lora_r=4, lora_alpha=12, **peft)
    return ModelConfig(
        name="m", name_or_path=str(path), use_peft=True, quantization=quantization, peft=lora, **given
    )


def pair(path: Path, **more: Any) -> tuple[Policy, Policy]:
    """The quantised policy, and one that has its weights as plain ones; adapters alike, and not at their
    start."""
    made = [load_policy(settings(path, way, **more), CPU) for way in ("nf4", None)]
    for policy in made:
        perturb(policy)
    with torch.no_grad():
        for name, layer in quantised(made[0].model).items():
            linear = made[1].model.get_submodule(name.removesuffix(".packed"))
            assert type(linear) is nn.Linear
            linear.weight.copy_(layer.weight)
    return made[0], made[1]


def assert_equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


# -- numbers ---------------------------------------------------------------------------------------


def the_numbers_are_torchaos() -> None:
    """To the bit, and each is one of the 16 levels times something near its block's largest weight."""
    torch.manual_seed(0)
    for rows, columns in ((128, 128), (128, 352), (7, 48), (64, 1536), (1, 16), (33, 64)):
        weight = torch.randn(rows, columns) * 0.02
        block = block_length(columns)
        assert block is not None
        given = unpack(pack(weight), TABLE, columns)
        theirs = NF4Tensor.from_tensor(weight, block, columns // block)
        assert torch.equal(given, theirs.get_original_weight())
        largest = weight.view(-1, block).abs().amax(-1, keepdim=True)
        error = (given.view(-1, block) - weight.view(-1, block)).abs()
        gap = max(b - a for a, b in pairwise(LEVELS))
        spread = (largest - largest.mean()).abs().view(rows, -1).amax(-1).repeat_interleave(columns // block)
        assert (error <= largest * gap / 2 + spread[:, None] / 127 + 1e-7).all()


def zeros_stay_zeros_and_alike_scales_are_finite() -> None:
    """Where torchao divides 0 by 0."""
    weight = torch.randn(8, 256)
    weight[2], weight[5, 64:128] = 0.0, 0.0
    given = unpack(pack(weight), TABLE, 256)
    assert torch.equal(given == 0, (weight == 0) | (given == 0)) and not given[weight == 0].any()
    for alike in (torch.full((4, 128), 0.5), torch.zeros(4, 128)):
        assert torch.equal(unpack(pack(alike), TABLE, 128), alike)


def a_weight_takes_half_a_byte_and_its_scale() -> None:
    linear = nn.Linear(1536, 512, bias=False).requires_grad_(False)
    layer = NF4Linear(linear)
    assert layer.packed.dtype == torch.uint8
    assert layer.packed.numel() == 512 * (1536 / 2 + 1536 / BLOCK + 8)
    assert [p.shape for p in NF4Linear(linear.to("meta")).parameters()] == [layer.packed.shape]


# -- the model -------------------------------------------------------------------------------------


def it_is_the_model_with_the_rounded_weights(way: str) -> None:
    """Log-probabilities, entropies and the adapters' gradients, to the bit; sharded, as it trains."""
    with folder_of(tiny_llama()) as path:
        ours, plain = pair(path, **WAYS[way])
        assert len(quantised(ours.model)) == 14  # 7 in each of 2 layers
        for policy in (ours, plain):
            dtype = torch.bfloat16 if way == "bfloat16" else torch.float32
            shard(policy, decoder_blocks(policy), start(), dtype)
        values = [policy(batch()) for policy in (ours, plain)]
        assert torch.equal(values[0], values[1]) and values[0].any()
        for value in values:
            value.square().sum().backward()
        gradients = [
            {name: p.grad.full_tensor() for name, p in policy.named_parameters() if p.grad is not None}
            for policy in (ours, plain)
        ]
        assert gradients[0] and all(g.any() for g in gradients[0].values())
        assert_equal(*gradients)


def what_is_exported_is_what_was_trained(dtype: str) -> None:
    """Adapters are merged into the rounded weights, gathered at once or one by one, and what transformers
    loads of it scores as the policy did."""
    with folder_of(tiny_llama(tied=False)) as path:
        ours, plain = pair(path, dtype=dtype)
        before = ours(batch()).detach()
        wanted = copy.deepcopy(plain.model).merge_and_unload().state_dict()
        state = full_state(ours)
        assert_equal(state, full_state(plain))
        one_by_one = [dict(whole_weights(policy, torch.float32)) for policy in (ours, plain)]
        assert_equal(*one_by_one)
        assert state.keys() == wanted.keys() == one_by_one[0].keys()
        if dtype == "float32":
            for name, value in wanted.items():
                torch.testing.assert_close(state[name], value, rtol=1e-6, atol=1e-6)
            export(state, ours, tokenizer(), path / "out", torch.float32)
            loaded = AutoModelForCausalLM.from_pretrained(path / "out")
            torch.testing.assert_close(Policy(loaded)(batch()), before, rtol=1e-4, atol=1e-4)


def the_fingerprint_is_another() -> None:
    """So that no cached score of the one is taken for the other's; and it is the same each time."""
    with folder_of(tiny_llama()) as path:
        found = [
            weights_fingerprint(load_policy(settings(path, way), CPU).named_parameters())
            for way in (None, "nf4", "nf4")
        ]
        assert found[0] != found[1] == found[2]


def every_architecture_is_right_or_refused() -> None:
    """Those that the tests know: the refused have experts, which are no linear layers."""
    for family in sorted(FAMILIES.keys() - {"mamba2"}):  # peft has no adapters for its layers
        kernel = {"attn_implementation": FAMILIES[family]._attn_implementation or "sdpa"}
        with folder_of(tiny_family(family).model) as path:
            if family in MIXTURES:
                with pytest.raises(ConfigError, match=r"model\.quantization=nf4: .* linear layers.*use off"):
                    check_model(settings(path, "nf4", **kernel))
                continue
            ours, plain = pair(path, **kernel)
            assert torch.equal(ours(batch()), plain(batch())), family


# -- runs ------------------------------------------------------------------------------------------


def the_reference_is_that_of_a_second_model(loss: str, k: int | None) -> None:
    """As for a base that is not quantised: losses of every step and the final weights to the bit, the first
    of them against a policy that is its own reference."""
    plain = test_two_models.make_policy

    def make_policy(lora: bool) -> Policy:
        policy = plain(lora)
        quantise(decoder_blocks(policy))
        return policy

    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setattr(test_two_models, "make_policy", make_policy)
        test_two_models.test_bit_identical_to_a_second_model(Path(folder), loss, k, True)


def a_resumed_run_ends_where_it_would_have() -> None:
    variant = (
        "dpo",
        "humanline=true",
        "model.use_peft=true",
        "model.peft.lora_r=4",
        "model.quantization=nf4",
    )
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        whole = test_runs.undisturbed_runs(here, here / "cache")
        test_runs.test_k_steps_and_the_rest_are_n_steps(here, here / "cache", patch, whole, variant)
        run = whole(f"loss={variant[0]}", *test_runs.EVERY, *variant[1:])
        (newest, *_) = sorted((run / "checkpoints").iterdir(), reverse=True)
        names = read_table(newest).state_dict_metadata
        assert names and all("lora_" in name for name in names if name.startswith("model."))


CHECKS: tuple[Callable[..., None], ...] = (
    the_numbers_are_torchaos,
    zeros_stay_zeros_and_alike_scales_are_finite,
    a_weight_takes_half_a_byte_and_its_scale,
    it_is_the_model_with_the_rounded_weights,
    what_is_exported_is_what_was_trained,
    the_fingerprint_is_another,
    every_architecture_is_right_or_refused,
    the_reference_is_that_of_a_second_model,
    a_resumed_run_ends_where_it_would_have,
)


def checked(name: str, *arguments: Any) -> None:
    """One of the checks."""
    start()
    (check,) = (each for each in CHECKS if each.__name__ == name)
    check(*arguments)


if __name__ == "__main__":
    serve({"checked": checked})
