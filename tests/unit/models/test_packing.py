"""Which rows are put end to end when nobody says so, and that a run with them is the padded run."""

from __future__ import annotations

import copy
import re
from dataclasses import replace

import pytest
import torch

from common.errors import ConfigError
from config.schema_model import ModelConfig
from data.batches import Segment
from models import attention
from models.attention import MODEL_TYPES, packs_rows, shares_prompts
from models.distributed import start
from models.pretrained import load_policy
from tests.engine import engine_config, make_trainer, run, weights
from tests.tiny import random_groups, tiny_llama
from tests.unit.models.test_families import FAMILIES, PACKED

OPEN = ModelConfig(name="m", name_or_path="m", max_length=64, max_prompt_length=32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    tiny_llama().save_pretrained(path)
    return path


def machine(monkeypatch, fails=False) -> None:
    """One without a GPU (False), or whose GPU's kernel ``fails`` for so (rows that share prompts, compiled
    layers)."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: fails is not False)
    monkeypatch.setattr(
        attention, "flash_fails", lambda heads, shared=False, compiled=False: fails(shared, compiled)
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_left_open_rows_are_packed_where_each_can_attend_to_itself(monkeypatch, family):
    machine(monkeypatch)
    found = FAMILIES[family]
    kernel, takes = found._attn_implementation or "sdpa", found.model_type in MODEL_TYPES
    packed, why = packs_rows(replace(OPEN, attn_implementation=kernel), found)
    assert packed == takes and (f"{family} with {kernel} has no packed" in why) != takes
    for on in (True, False) if family in PACKED else ():
        wanted = (on, f"model.packing={str(on).lower()}")
        assert packs_rows(replace(OPEN, packing=on, compile=True), found) == wanted


def llama(**found):
    """The settings of a tiny llama, with others in it."""
    config = copy.deepcopy(FAMILIES["llama"])
    for key, value in found.items():
        object.__setattr__(config, key, value)
    return config


EAGER, COMPILED, HALF = {"attn_implementation": "eager"}, {"compile": True}, {"dtype": "bfloat16"}
FAILS = {
    "none": False,
    "good": lambda shared, compiled: None,
    "not compiled": lambda shared, compiled: "no such image" if compiled else None,
    "not shared": lambda shared, compiled: "no such image" if shared else None,
}
"""GPU -> why its kernel fails."""


@pytest.mark.parametrize(
    ("gpu", "change", "found", "why"),
    [
        ("none", EAGER, {}, "llama with eager"),
        ("none", COMPILED, {}, "model.compile=true"),
        ("none", {}, {"sliding_window": 4}, "has no packed attention"),
        ("good", {}, {}, "float32"),
        ("not compiled", HALF, {}, None),
        ("not compiled", HALF | COMPILED, {}, "no such image"),
    ],
)
def test_rows_are_padded_where_packing_cannot_be_and_the_reason_is_said(monkeypatch, gpu, change, found, why):
    machine(monkeypatch, FAILS[gpu])
    packed, said = packs_rows(replace(OPEN, **({"dtype": "float32"} | change)), llama(**found))
    assert packed is (why is None) and (why or "") in said


@pytest.mark.parametrize(
    ("gpu", "change", "found", "why"),
    [
        ("none", EAGER | {"packing": True}, {}, "a mask that knows of no shared prompt"),
        ("none", {"packing": False}, {}, "padded (model.packing=false)"),
        ("none", {"router_aux_loss_coef": 0.1}, {}, "router_aux_loss_coef"),
        ("none", {"head": "reward"}, {}, "a reward model"),
        ("not shared", HALF, {}, "no such image"),
    ],
)
def test_a_prompt_cannot_be_shared_where_rows_are_padded_or_kept_apart_by_a_mask(
    monkeypatch, gpu, change, found, why
):
    machine(monkeypatch, FAILS[gpu])
    config, settings = llama(**found), replace(OPEN, share_prompts=True, **change)
    packing, _ = packs_rows(settings, config)
    assert packing or gpu == "none"
    with pytest.raises(ConfigError, match=f"share_prompts.*{re.escape(why)}"):
        shares_prompts(settings, config, packing)
    for other in (False, None):
        assert not shares_prompts(replace(settings, share_prompts=other), config, packing)


def trained(folder, loss: str, packing: str, *overrides: str):
    """A run through the loading that a real one takes: (trainer, lines of metrics)."""
    units, kind = (3, "pairs") if loss == "dpo" else (6, "labelled")
    words = [f"model.batch_size={units}", f"model.name_or_path={folder}", f"model.packing={packing}"]
    config = engine_config(folder / f"cache-{packing}", loss, *words, *overrides)
    trainer = make_trainer(config, load_policy(config.model, start().device))
    (first, *_) = trainer.dealer.microbatches(random_groups(2, kind=kind)[0])
    packs = packing != "false"
    assert trainer.dealer.packing == packs == (first.sequences.position_ids is not None)
    groups = random_groups(8, kind=kind)
    return run(config, Segment(groups, units, sum(map(len, groups)), seed=1), trainer)


@pytest.mark.skipif(torch.cuda.is_available(), reason="in float32 a GPU pads")
@pytest.mark.parametrize("humanline", ["true", "false"])
@pytest.mark.parametrize("loss", ["dpo", "kto", "grpo"])
def test_a_run_with_packed_rows_or_shared_prompts_is_the_padded_run(folder, loss, humanline):
    """The same losses and weights but for rounding; and at step 0 the policy is its reference to the bit. One
    that shares prompts takes no scores of the initial weights from one that does not, whose cache it has."""
    more = f"humanline={humanline}"
    ways = ("false",), ("null",), ("null", "model.share_prompts=true")
    (padded, expected), *others = (trained(folder, loss, *way, more) for way in ways)
    assert [trainer.dealer.shares_prompts for trainer, _ in others] == [False, True]
    begin, theirs = dict(tiny_llama().named_parameters()), weights(padded)
    way = sum(float((theirs[f"model.{n}"] - p.detach()).square().sum()) for n, p in begin.items()) ** 0.5
    for trainer, lines in others:
        assert lines[0]["kl"] == expected[0]["kl"] == 0.0 and lines[-1]["kl"] != 0.0
        for line, other in zip(lines, expected, strict=True):
            assert line["loss"] == pytest.approx(other["loss"], abs=1e-4)
            assert line["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-2)
        ours = weights(trainer)
        apart = sum(float((ours[n] - theirs[n]).square().sum()) for n in ours) ** 0.5
        assert way > 0.05 and apart < 0.02 * way
