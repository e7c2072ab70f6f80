"""model.compile=auto: layers are compiled where scores with a gradient are then those without one."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.steps import drawn_pairs, llama, random_policy
from data.batches import microbatch
from data.types import Example
from jobs import compiling
from models.policy import decoder_blocks
from tests.tiny import make_config

PAIRS = drawn_pairs(2, 100, 9, 6, 30, seed=3)
MICRO = microbatch([Example(f"p{i}", pair) for i, pair in enumerate(PAIRS)], torch.device("cpu"), False)


def compiled_alike(forward: Any, **how: Any) -> Any:
    return forward


def compiled_apart(forward: Any, **how: Any) -> Any:
    """A compiler that makes another program where there is a gradient."""
    return lambda *a, **k: forward(*a, **k) * (1.001 if torch.is_grad_enabled() else 1.0)


def not_compiled(forward: Any, **how: Any) -> Any:
    def fails(*a: Any, **k: Any) -> Any:
        raise RuntimeError("no compiler here\nat all")

    return fails


@pytest.mark.parametrize("way", [False, True, "selective"])
@pytest.mark.parametrize(
    ("compiler", "device", "compiled", "why"),
    [
        (compiled_alike, "cuda", True, "compiled, and agree with themselves"),
        (compiled_apart, "cuda", False, "nats apart"),
        (not_compiled, "cuda", False, "fail (RuntimeError: no compiler here)"),
        (not_compiled, "cpu", False, "a CPU gains nothing"),
    ],
)
def test_layers_are_compiled_where_they_agree(monkeypatch, compiler, device, compiled, why, way):
    policy, config = random_policy(llama(100, 32, 3, 2, 2, 64), torch.device("cpu")), make_config("loss=dpo")
    monkeypatch.setattr(torch, "compile", compiler)
    monkeypatch.setattr(compiling, "gather_objects", lambda value: [value])
    trainer: Any = SimpleNamespace(
        config=replace(config, model=replace(config.model, compile="auto", activation_checkpointing=way)),
        policy=policy,
        world=SimpleNamespace(device=SimpleNamespace(type=device)),
        microbatches=lambda batch: [MICRO],
    )
    said: list[str] = []
    train: Any = SimpleNamespace(batch=lambda i: list(MICRO.examples))
    setting = compiling.compiled_where_exact(trainer, train, said.append).model.compile
    assert (setting, policy.compiled) == (compiled, compiled) and why in said[0] and "\n" not in said[0]
    assert all(p.grad is None for p in policy.parameters())
    assert policy(MICRO.sequences).requires_grad  # by eager layers, where compiled ones were no good
    set_up = compiled or bool(way and device == "cuda")
    assert all(("forward" in vars(block)) == set_up for block in decoder_blocks(policy))


def test_placeholders_of_rounds_are_tried_with_other_tokens():
    placeholder = replace(MICRO.examples[0], prompt_id="")
    first, second = (compiling.drawn(placeholder, seed, 100) for seed in (0, 1))
    assert first.prompt_id != second.prompt_id
    for row, of in zip(first.rows, placeholder.rows, strict=True):
        assert len(row) == len(of) and 1 < len(set(row.completion_ids.tolist())) < 100
    assert compiling.drawn(MICRO.examples[0], 0, 100) is MICRO.examples[0]
