"""Which rows are put end to end when nobody says so, and that a run with them is the padded run."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from common.errors import ConfigError
from config.schema_model import ModelConfig
from data.batches import Segment
from models import attention
from models.attention import MODEL_TYPES, flash_fails, packs_rows, shares_prompts
from models.distributed import start
from models.policy import decoder_blocks
from models.pretrained import load_policy
from models.sharding import shard
from tests.engine import engine_config, run, weights
from tests.tiny import random_groups, tiny_llama
from tests.unit.models.test_families import FAMILIES, PACKED
from trainers.assembly import make_loss, trainer_class

OPEN = ModelConfig(name="m", name_or_path="m", max_length=64, max_prompt_length=32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    tiny_llama().save_pretrained(path)
    return path


def no_gpu(monkeypatch, present: bool = False, fails: str | None = None) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: present)
    monkeypatch.setattr(attention, "flash_fails", lambda heads, shared=False, compiled=False: fails)


@pytest.mark.parametrize("family", [family for family in PACKED if family in FAMILIES])
@pytest.mark.parametrize("said", [True, False])
def test_what_is_said_is_done(monkeypatch, family, said):
    no_gpu(monkeypatch)
    assert packs_rows(replace(OPEN, packing=said, compile=True), FAMILIES[family]) == (
        said,
        f"model.packing={str(said).lower()}",
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_left_open_rows_are_packed_where_each_can_attend_to_itself(monkeypatch, family):
    no_gpu(monkeypatch)
    found = FAMILIES[family]
    kernel, takes = found._attn_implementation or "sdpa", found.model_type in MODEL_TYPES
    packed, why = packs_rows(replace(OPEN, attn_implementation=kernel), found)
    assert packed == takes and (f"{family} with {kernel} has no packed" in why) != takes


@pytest.mark.parametrize(
    ("change", "found", "why"),
    [
        ({"attn_implementation": "eager"}, {}, "llama with eager"),
        ({"attn_implementation": "flash_attention_2"}, {}, "llama with flash_attention_2"),
        ({"compile": True}, {}, "model.compile=true"),
        ({}, {"sliding_window": 4}, "has no packed attention"),
        ({}, {"model_type": "falcon"}, "falcon with sdpa"),
    ],
)
def test_left_open_rows_are_padded_elsewhere(monkeypatch, change, found, why):
    no_gpu(monkeypatch)
    config = type(FAMILIES["llama"])(**FAMILIES["llama"].to_dict())
    for key, value in found.items():
        object.__setattr__(config, key, value)
    packed, said = packs_rows(replace(OPEN, **change), config)
    assert not packed and why in said


@pytest.mark.parametrize(
    ("fails", "dtype", "packed", "why"),
    [
        (None, "bfloat16", True, ""),
        ("no such image", "bfloat16", False, "no such image"),
        (None, "float32", False, "float32"),
    ],
)
@pytest.mark.parametrize("compiled", [False, True])
def test_on_a_gpu_its_kernel_decides(monkeypatch, fails, dtype, packed, why, compiled):
    no_gpu(monkeypatch, present=True)
    other = "that of the other way"
    tried = {compiled: fails, not compiled: other}
    monkeypatch.setattr(attention, "flash_fails", lambda heads, shared=False, compiled=False: tried[compiled])
    found, said = packs_rows(replace(OPEN, dtype=dtype, compile=compiled), FAMILIES["llama"])
    assert other not in said
    assert found is packed and why in said


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0),
    reason="needs an Ampere GPU or later",
)
def test_the_kernel_of_this_gpu_works():
    for compiled in (False, True):
        for shared in (False, True):
            assert flash_fails((4, 2, 64), shared, compiled) is None


@pytest.mark.parametrize(
    ("change", "found", "why"),
    [
        ({"attn_implementation": "eager", "packing": True}, {}, "a mask that knows of no shared prompt"),
        ({"attn_implementation": "eager"}, {}, "no packed attention"),
        ({"compile": True}, {}, "padded (model.compile=true)"),
        ({"packing": False}, {}, "padded (model.packing=false)"),
        ({"router_aux_loss_coef": 0.1}, {}, "router_aux_loss_coef"),
        ({"head": "reward"}, {}, "a reward model"),
        ({}, {"sliding_window": 4}, "no packed attention"),
    ],
)
def test_a_prompt_cannot_be_shared_where_rows_are_padded_or_kept_apart_by_a_mask(
    monkeypatch, change, found, why
):
    no_gpu(monkeypatch)
    config = type(FAMILIES["llama"])(**FAMILIES["llama"].to_dict())
    for key, value in found.items():
        object.__setattr__(config, key, value)
    settings = replace(OPEN, share_prompts=True, **change)
    packing, _ = packs_rows(settings, config)
    with pytest.raises(ConfigError, match="share_prompts") as error:
        shares_prompts(settings, config, packing)
    assert why in str(error.value)
    for other in (False, None):
        assert not shares_prompts(replace(settings, share_prompts=other), config, packing)


def test_on_a_gpu_whose_kernel_cannot_prompts_are_not_shared(monkeypatch):
    no_gpu(monkeypatch, present=True)
    fails = {False: None, True: "no such image"}
    monkeypatch.setattr(attention, "flash_fails", lambda heads, shared=False, compiled=False: fails[shared])
    settings = replace(OPEN, share_prompts=True, dtype="bfloat16")
    assert packs_rows(settings, FAMILIES["llama"])[0]
    with pytest.raises(ConfigError, match="no such image"):
        shares_prompts(settings, FAMILIES["llama"], True)
    assert not shares_prompts(replace(settings, share_prompts=None), FAMILIES["llama"], True)
    monkeypatch.setattr(attention, "flash_fails", lambda heads, shared=False, compiled=False: None)
    for asked in (True, None):
        assert shares_prompts(replace(settings, share_prompts=asked), FAMILIES["llama"], True)


def trained(folder, loss: str, packing: str, *overrides: str):
    """A run through the loading that a real one takes: (trainer, lines of metrics)."""
    units = 3 if loss == "dpo" else 6
    config = engine_config(
        folder / f"cache-{packing}",
        loss,
        f"model.batch_size={units}",
        f"model.name_or_path={folder}",
        f"model.packing={packing}",
        *overrides,
    )
    policy, world = load_policy(config.model, start().device), start()
    shard(policy, decoder_blocks(policy), world, torch.float32)
    trainer = trainer_class(config)(config, policy, make_loss(config), world)
    assert trainer.dealer.packing == (packing != "false")
    assert (
        trainer.dealer.microbatches(random_groups(2, kind=_kind(loss))[0])[0].sequences.position_ids
        is not None
    ) == trainer.dealer.packing
    groups = random_groups(8, kind=_kind(loss))
    return run(config, Segment(groups, units, sum(map(len, groups)), seed=1), trainer)


def _kind(loss: str) -> str:
    return "pairs" if loss == "dpo" else "labelled"


@pytest.mark.skipif(torch.cuda.is_available(), reason="in float32 a GPU pads")
@pytest.mark.parametrize("humanline", ["true", "false"])
@pytest.mark.parametrize("loss", ["dpo", "kto", "grpo"])
def test_a_run_with_packed_rows_is_the_padded_run(folder, loss, humanline):
    """The same losses and weights but for rounding; and at step 0 the policy is its reference to the bit."""
    trainer, lines = trained(folder, loss, "null", f"humanline={humanline}")
    _same_run(trainer, lines, *trained(folder, loss, "false", f"humanline={humanline}"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="in float32 a GPU pads")
@pytest.mark.parametrize("humanline", ["true", "false"])
@pytest.mark.parametrize("loss", ["dpo", "kto", "grpo"])
def test_a_run_that_shares_prompts_is_the_padded_run(folder, loss, humanline):
    """And takes no scores of the initial weights from a run that does not share them, whose cache it has."""
    more = f"humanline={humanline}"
    trained(folder, loss, "null", more)
    trainer, lines = trained(folder, loss, "null", more, "model.share_prompts=true")
    assert trainer.dealer.shares_prompts
    _same_run(trainer, lines, *trained(folder, loss, "false", more))


def _same_run(trainer, lines, padded, expected):
    assert lines[0]["kl"] == expected[0]["kl"] == 0.0 and lines[-1]["kl"] != 0.0
    for line, other in zip(lines, expected, strict=True):
        assert line["loss"] == pytest.approx(other["loss"], abs=1e-4) and line["grad_norm"] == pytest.approx(
            other["grad_norm"], rel=1e-2
        )
    begin = dict(tiny_llama().named_parameters())
    ours, theirs = weights(trainer), weights(padded)
    way = sum(float((theirs[f"model.{n}"] - p.detach()).square().sum()) for n, p in begin.items()) ** 0.5
    apart = sum(float((ours[n] - theirs[n]).square().sum()) for n in ours) ** 0.5
    assert way > 0.05 and apart < 0.02 * way
