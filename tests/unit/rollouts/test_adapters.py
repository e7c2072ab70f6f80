"""Whether adapters can go over alone, of what is known before weights load."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from common.errors import ConfigError
from config.schema_sampler import SamplerConfig
from rollouts.vllm import adapters
from rollouts.vllm.adapters import RANKS, base_of_adapters, highest_rank
from tests.tiny import make_config, tiny_llama

ONLINE = ("online=true", "loss=kto", "sampler=vllm", "model.use_peft=true")


@pytest.fixture(autouse=True)
def places(monkeypatch):
    """vLLM takes adapters in every layer: it is not asked."""
    monkeypatch.setattr(adapters, "check_places", lambda config, base: None)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("model.use_peft=false", "model.use_peft=false trains whole weights: leave it at auto"),
        ("model.from_config=true", "model.from_config=true draws them at random: .*=merged"),
        ("model.quantization=nf4", "model.quantization=nf4 trains on: .*=merged"),
        ("model.peft.lora_r=513", "ranks up to 512, and model.peft.lora_r=513: .*=merged"),
        ("sampler.weight_transfer=shared_memory", "weight_transfer=shared_memory .*use auto or disk"),
    ],
)
def test_what_stands_in_the_way_is_refused_where_it_was_asked_for_and_else_merged(words, said):
    config = make_config(*ONLINE, words)
    assert base_of_adapters(config) is None
    config = replace(config, sampler=replace(config.sampler, adapters="alone"))
    with pytest.raises(ConfigError, match=rf"^sampler\.adapters=alone: .*{said}"):
        base_of_adapters(config)


@pytest.mark.parametrize(
    ("words", "alone"),
    [
        ((), True),
        (("sampler.adapters=alone",), True),
        (("sampler.weight_transfer=disk",), True),
        (("sampler.adapters=merged",), False),
        (("online=false",), False),
    ],
)
def test_the_base_is_the_models_own_folder(words, alone):
    config = make_config(*ONLINE, *words)
    assert base_of_adapters(config) == (Path(config.model.name_or_path).resolve() if alone else None)


def test_a_model_that_is_stored_quantised_is_not_what_is_trained_on(tmp_path):
    tiny_llama().save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())
    stored["quantization_config"] = {"quant_method": "fp8"}
    (tmp_path / "config.json").write_text(json.dumps(stored))
    config = make_config(*ONLINE, "model=hub", f"model.name_or_path={tmp_path}")
    assert base_of_adapters(config) is None


def test_an_unknown_way_and_a_sampler_without_engines_are_refused():
    with pytest.raises(ConfigError, match=r"^sampler\.adapters=apart: use one of auto, merged, alone"):
        make_config(*ONLINE, "sampler.adapters=apart")
    with pytest.raises(ConfigError, match=r"^sampler\.adapters=alone: needs sampler=vllm"):
        SamplerConfig(name="embedded", adapters="alone")


def test_ranks_are_those_that_vllm_can_be_told():
    config = pytest.importorskip("vllm.config.lora")
    assert config.MaxLoRARanks.__args__ == RANKS
    assert [highest_rank(rank) for rank in (1, 2, 8, 9, 300, 512)] == [1, 8, 8, 16, 320, 512]
