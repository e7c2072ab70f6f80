"""A base in 4 bits: its numbers, that the model is the one with the rounded weights, what is exported, what
is refused. torchao is not in the environment of the tests: what needs it is checked in a process that has it
(four_bits.py)."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from transformers import GPT2Config, LlamaConfig

from common.errors import ConfigError
from common.worker_process import WorkerProcess
from models import quantization
from models.pretrained import check_model, load_policy
from models.quantization import block_length
from tests.tiny import make_config, tiny_llama
from tests.unit.models.test_lora import perturb
from tests.unit.models.test_policy import CPU, batch, settings
from train import train

SIZES = {"vocab_size": 61, "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 128}


LORA = {"use_peft": True, "quantization": "nf4"}


@pytest.fixture(scope="module")
def worker(quick_python: None, with_torchao: None) -> Iterator[WorkerProcess]:
    made = WorkerProcess("tests.unit.models.four_bits", log=None, env={"OMP_NUM_THREADS": "1"})
    yield made
    made.close()


@pytest.mark.parametrize(
    "name",
    [
        "the_numbers_are_torchaos",
        "zeros_stay_zeros_and_alike_scales_are_finite",
        "a_weight_takes_half_a_byte_and_its_scale",
        "the_fingerprint_is_another",
        "every_architecture_is_right_or_refused",
        "a_resumed_run_ends_where_it_would_have",
    ],
)
def test_checked_where_torchao_is(worker: WorkerProcess, name: str) -> None:
    worker.call("checked", name, timeout=300)


@pytest.mark.parametrize(
    "way", ["float32", "bfloat16", "checkpointed", "selective", "some layers have adapters"]
)
def test_it_is_the_model_with_the_rounded_weights(worker: WorkerProcess, way: str) -> None:
    worker.call("checked", "it_is_the_model_with_the_rounded_weights", way, timeout=300)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_exported_is_what_was_trained(worker: WorkerProcess, dtype: str) -> None:
    worker.call("checked", "what_is_exported_is_what_was_trained", dtype, timeout=300)


@pytest.mark.parametrize(("loss", "k"), [("dpo", None), ("kto", 1), ("grpo", 3)])
def test_the_reference_is_that_of_a_second_model(worker: WorkerProcess, loss: str, k: int | None) -> None:
    worker.call("checked", "the_reference_is_that_of_a_second_model", loss, k, timeout=300)


def any_bytes(weight: torch.Tensor) -> torch.Tensor:
    """Packed weights of some layer, all levels and several scales among them, without torchao."""
    rows, columns = weight.shape
    block = block_length(columns)
    assert block is not None
    ranges = torch.tensor([1280.0, 0.1]).expand(rows, 2).contiguous().view(torch.uint8)
    rest = torch.randint(0, 256, (rows, columns // block + columns // 2), dtype=torch.uint8)
    return torch.cat((ranges, rest), dim=1)


def test_compiled_layers_agree_with_plain_ones(tmp_path, monkeypatch):
    """Values and the adapters' gradients. C++ is made of plain layers' graphs alone, in test_policy.py."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    monkeypatch.setattr(torch._dynamo.config, "assume_static_by_default", False)
    monkeypatch.setattr(quantization, "torchao_nf4", lambda: None)
    monkeypatch.setattr(quantization, "pack", any_bytes)
    tiny_llama().save_pretrained(tmp_path)
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        policy = load_policy(settings(tmp_path, compile=compiled, **LORA), CPU)
        perturb(policy)
        values = policy(batch())
        values.square().sum().backward()
        found.append([values.detach(), *(p.grad for p in policy.parameters() if p.grad is not None)])
    assert len(quantization.quantised(policy)) == 14
    for plain, other in zip(*found, strict=True):
        torch.testing.assert_close(other, plain, rtol=1e-3, atol=1e-3 * float(plain.abs().max()))


# -- what is refused -------------------------------------------------------------------------------


@pytest.fixture
def without_torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torchao", "torchao.quantization"):
        monkeypatch.setitem(sys.modules, name, None)


def test_without_torchao_it_is_refused_before_weights_are_loaded(without_torchao, tmp_path):
    config = make_config("model.use_peft=true", "model.quantization=nf4", f"runs_dir={tmp_path}", "loss=dpo")
    with pytest.raises(
        ConfigError,
        match=r"model\.quantization=nf4: needs torchao, .*/small-gpus\.txt, or use model\.",
    ):
        train(config, "run")
    assert not list(tmp_path.rglob("*.safetensors"))
    check_model(make_config("model.use_peft=true").model)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["model.quantization=nf4"], r"model\.quantization=nf4: .*model\.use_peft=true"),
        (["model.use_peft=true", "model.quantization=int8"], r"model\.quantization=int8: use one of"),
        (["model.use_peft=true", "model.quantization=true"], r"model\.quantization=.*rue"),
    ],
)
def test_settings_that_cannot_be_are_refused(given, said):
    with pytest.raises(ConfigError, match=said):
        make_config(*given)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (LlamaConfig(**SIZES, hidden_size=32, intermediate_size=37), "rows of 37 weights, which no even bl"),
        (LlamaConfig(**SIZES, hidden_size=32, intermediate_size=74), "rows of 74 weights, which no even bl"),
        (GPT2Config(**SIZES), "0% of the weights of this model's layers are in linear layers"),
    ],
    ids=["odd rows", "short blocks", "transposed weights"],
)
def test_a_model_that_cannot_be_quantised_is_refused_before_weights_are_loaded(
    tmp_path, monkeypatch, found, said
):
    """There is a folder with a config.json alone. torchao is not asked: only whether it is there."""
    monkeypatch.setattr(quantization, "torchao_nf4", lambda: None)
    found.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=rf"model\.quantization=nf4: .*{said}.*use off"):
        check_model(settings(tmp_path, **LORA))


def test_a_model_that_is_stored_quantised_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(quantization, "torchao_nf4", lambda: None)
    found = LlamaConfig(**SIZES, hidden_size=32, intermediate_size=64)
    found.quantization_config = {"quant_method": "fp8"}
    found.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"model\.quantization=nf4: .* is stored quantised"):
        check_model(settings(tmp_path, **LORA))


@pytest.mark.parametrize(
    ("columns", "block"), [(64, 64), (1536, 64), (352, 44), (48, 48), (16, 16), (74, None), (37, None)]
)
def test_blocks_lie_within_rows(columns, block):
    assert block_length(columns) == block
