"""The reference without weights, against the plain thing: a second model, synced by copying.

Losses of every step and the final weights are bit-identical, for every loss, with and without humanline, with
and without LoRA. The bounds are tight and not symmetric, so that each of them clips, the scores that make
KTO's z0 among them.
"""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from data.batches import Segment
from models.policy import Policy
from tests.engine import engine_config, make_segment, make_trainer, run
from tests.second_model import INFINITE, LR, Bounds, Synced, assert_identical
from tests.tiny import tiny_llama
from trainers.basic import BasicTrainer

STEPS = 7
BOUNDS = [(-0.02, 0.05), (-0.06, 0.01)]
"""log epsilon_P and log epsilon_R, nats: more is cut off below (so z0 is positive), and more above."""


def make_policy(lora: bool) -> Policy:
    model = tiny_llama()
    if lora:
        torch.manual_seed(1)
        own = {"lora_dropout": 0.0, "target_modules": "all-linear", "init_lora_weights": False}
        model = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, **own))
    return Policy(model).eval()


def trained(
    folder: Path, loss: str, k: int | None, bounds: Bounds, start: Policy
) -> tuple[BasicTrainer[Any], list[dict[str, Any]], Segment]:
    """(trainer, its lines, its segment) of a run of ours from ``start``."""
    units = 4 if loss == "dpo" else 8
    humanline = [f"humanline={k is not None}".lower()]
    if k:
        humanline += [f"sync_freq={k}", f"log_epsilon_P={bounds[0]}", f"log_epsilon_R={bounds[1]}"]
    config = engine_config(folder, loss, f"model.batch_size={units}", "model.microbatches=2", *humanline)
    segment = make_segment(config, pairs=4 * STEPS)
    return *run(config, segment, make_trainer(config, copy.deepcopy(start))), segment


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("k", [None, 1, 3])
@pytest.mark.parametrize("loss", ["dpo", "kto", "grpo"])
def test_bit_identical_to_a_second_model(tmp_path, loss, k, lora):
    start = make_policy(lora)
    for bounds in BOUNDS if k else [INFINITE]:
        trainer, lines, segment = trained(tmp_path, loss, k, bounds, start)
        plain = Synced(trainer, copy.deepcopy(start), bounds, k)
        assert_identical(trainer, lines, plain, segment)
        assert any(
            not torch.equal(p.detach(), q.detach())
            for p, q in zip(plain.policy.parameters(), start.parameters(), strict=True)
        )
        assert lines[-1]["loss"] != lines[0]["loss"]
        if k:
            assert all(any(line[side] > 0 for line in lines) for side in ("clipped_low", "clipped_high"))
        if k and loss == "kto" and bounds == BOUNDS[0]:
            assert any(plain.offsets), "z0 is positive somewhere"


class SyncsAfterTheStep(Synced):
    def move(self, t: int, updated: bool) -> None:
        super().move(t, not updated)


class Z0OfUnclippedScores(Synced):
    bounds_of_z0 = INFINITE


class Z0BelowZero(Synced):
    least_z0 = -math.inf


class DecaysMatricesAlone(Synced):
    def make_optimizer(self) -> torch.optim.Optimizer:
        matrices, vectors = ([p for p in self.params if (p.dim() > 1) is matrix] for matrix in (True, False))
        groups = [{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=LR, eps=self.config.eps, fused=True)


class BoundsChangePlaces(Synced):
    def __init__(self, trainer: BasicTrainer[Any], policy: Policy, bounds: Bounds, k: int | None) -> None:
        super().__init__(trainer, policy, (-bounds[1], -bounds[0]), k)


FLAWS = [
    (SyncsAfterTheStep, "dpo", 1, BOUNDS[0]),
    (SyncsAfterTheStep, "dpo", 3, BOUNDS[0]),
    (Z0OfUnclippedScores, "kto", 3, BOUNDS[0]),
    (Z0BelowZero, "kto", 3, BOUNDS[1]),
    (DecaysMatricesAlone, "dpo", None, INFINITE),
    *((BoundsChangePlaces, loss, 3, bounds) for loss in ("dpo", "kto") for bounds in BOUNDS),
]


@pytest.mark.parametrize(("flawed", "loss", "k", "bounds"), FLAWS)
def test_a_flawed_second_model_would_not_pass(tmp_path, flawed, loss, k, bounds):
    """The test above can fail: what is done wrong here shows in the losses."""
    start = make_policy(lora=False)
    trainer, lines, segment = trained(tmp_path, loss, k, bounds, start)
    wrong = flawed(trainer, copy.deepcopy(start), bounds, k).train(segment)
    assert [line["loss"] for line in lines] != wrong
    if flawed is SyncsAfterTheStep and k == 1:  # the reference always equals the policy
        assert wrong == pytest.approx([math.log(2)] * STEPS, abs=1e-6)
