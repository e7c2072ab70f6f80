"""The reference without weights, against the plain thing: a second model, synced by copying.

Losses of every step and the final weights are bit-identical, for every loss, with and without humanline, with
and without LoRA. The bounds are tight and not symmetric, so that each of them clips, the scores that make
KTO's z0 among them.
"""

from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model

from data.batches import Segment
from models.policy import Policy
from tests.engine import engine_config, make_segment, make_trainer, run, weights
from tests.tiny import tiny_llama
from trainers.assembly import make_loss
from trainers.basic import BasicTrainer
from trainers.losses.base import TokenScores

STEPS, LR = 7, 0.003
BOUNDS = [(-0.02, 0.05), (-0.06, 0.01)]
"""log epsilon_P and log epsilon_R, nats: more is cut off below (so z0 is positive), and more above."""


def make_policy(lora: bool) -> Policy:
    model = tiny_llama()
    if lora:
        torch.manual_seed(1)
        model = get_peft_model(
            model,
            LoraConfig(
                r=4, lora_alpha=8, lora_dropout=0.0, target_modules="all-linear", init_lora_weights=False
            ),
        )
    return Policy(model).eval()


INFINITE = (-float("inf"), float("inf"))


def two_models(
    trainer: BasicTrainer,
    policy: Policy,
    segment: Segment,
    k: int | None,
    bounds: tuple[float, float] = INFINITE,
    flaw: str = "",
) -> tuple[list[float], list[float]]:
    """Plain training with a live second model, in the order of the paper's listing (C.2.1). ``trainer`` only
    cuts the batches.

    Returns each step's loss and z0 (0.0 but for KTO). ``flaw`` is something to do wrong.
    """
    config, loss = trainer.config, make_loss(trainer.config)
    reference = copy.deepcopy(policy)
    params = [p for p in policy.parameters() if p.requires_grad]
    groups = [{"params": params, "weight_decay": config.weight_decay}]
    if flaw == "weight decay on matrices alone":
        matrices, vectors = ([p for p in params if (p.dim() > 1) is matrix] for matrix in (True, False))
        groups = [groups[0] | {"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.999), eps=config.eps, fused=True)
    losses, offsets = [], []

    def scores(sequences, low, high):
        p = policy(sequences)
        with torch.no_grad():
            r = reference(sequences)
        return TokenScores(p, r, (p - r).clamp(low, high), sequences.mask)

    of_z0 = INFINITE if flaw == "z0 of unclipped scores" else bounds
    for t in range(segment.steps):
        batch = segment.batch(t)
        micros = trainer.dealer.microbatches(batch)
        tokens = sum(len(r.completion_ids) for e in batch for r in e.rows)
        units = tokens if config.loss["name"] == "grpo" else len(batch)
        total, z0 = torch.zeros((), dtype=torch.float64), torch.zeros(())
        if config.loss["name"] == "kto":
            with torch.no_grad():
                each = torch.cat([scores(m.mismatched, *of_z0).sequence_log_ratio().double() for m in micros])
            z0 = (each.sum() / len(each)).float()
            if flaw != "z0 below zero":
                z0 = z0.clamp(min=0)
        for m in micros:
            s = scores(m.sequences, *bounds)
            if config.loss["name"] == "dpo":
                result = loss(*s.split(len(m.examples)))
            elif config.loss["name"] == "kto":
                result = loss(s, m.labels > 0, z0)
            else:
                result = loss(s, m.labels)
            (result.total * (1 / units)).backward()
            total += result.total.detach().double()
        torch.nn.utils.clip_grad_norm_(params, config.model.max_grad_norm)
        due = k is not None and t % k == 0
        if due and flaw != "sync after the step":
            reference.load_state_dict(policy.state_dict())
        optimizer.step()
        optimizer.zero_grad()
        if due and flaw == "sync after the step":
            reference.load_state_dict(policy.state_dict())
        losses.append(float(total / units))
        offsets.append(float(z0))
    return losses, offsets


def trained(tmp_path, loss: str, k: int | None, bounds: tuple[float, float], start: Policy):
    """(trainer, its lines, its segment) of a run of ours from ``start``."""
    units = 4 if loss == "dpo" else 8
    low, high = bounds
    humanline = (
        [f"sync_freq={k}", "humanline=true", f"log_epsilon_P={low}", f"log_epsilon_R={high}"]
        if k
        else ["humanline=false"]
    )
    config = engine_config(tmp_path, loss, f"model.batch_size={units}", "model.microbatches=2", *humanline)
    segment = make_segment(config, pairs=4 * STEPS)
    return *run(config, segment, make_trainer(config, copy.deepcopy(start))), segment


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("k", [None, 1, 3])
@pytest.mark.parametrize("loss", ["dpo", "kto", "grpo"])
def test_bit_identical_to_a_second_model(tmp_path, loss, k, lora):
    start = make_policy(lora)
    for bounds in BOUNDS if k else [INFINITE]:
        plain = copy.deepcopy(start)
        trainer, lines, segment = trained(tmp_path, loss, k, bounds, start)
        expected, offsets = two_models(trainer, plain, segment, k, bounds)
        assert [line["loss"] for line in lines] == expected
        final = weights(trainer)
        for name, p in plain.named_parameters():
            assert torch.equal(final[name], p.detach()), name
        assert any(
            not torch.equal(p.detach(), q.detach())
            for p, q in zip(plain.parameters(), start.parameters(), strict=True)
        )
        assert lines[-1]["loss"] != lines[0]["loss"]
        if k:
            assert all(any(line[side] > 0 for line in lines) for side in ("clipped_low", "clipped_high"))
        if k and loss == "kto" and bounds == BOUNDS[0]:
            assert any(offsets), "z0 is positive somewhere"


FLAWS = [
    ("sync after the step", "dpo", 1, BOUNDS[0]),
    ("sync after the step", "dpo", 3, BOUNDS[0]),
    ("z0 of unclipped scores", "kto", 3, BOUNDS[0]),
    ("z0 below zero", "kto", 3, BOUNDS[1]),
    ("weight decay on matrices alone", "dpo", None, INFINITE),
]


@pytest.mark.parametrize(("flaw", "loss", "k", "bounds"), FLAWS)
def test_a_flawed_second_model_would_not_pass(tmp_path, flaw, loss, k, bounds):
    """The test above can fail: what is done wrong here shows in the losses."""
    start = make_policy(lora=False)
    trainer, lines, segment = trained(tmp_path, loss, k, bounds, start)
    wrong, _ = two_models(trainer, copy.deepcopy(start), segment, k, bounds, flaw)
    assert [line["loss"] for line in lines] != wrong
    if flaw == "sync after the step" and k == 1:  # the reference always equals the policy: ln 2 for ever
        assert wrong == pytest.approx([0.6931472] * STEPS, abs=1e-6)


@pytest.mark.parametrize("loss", ["dpo", "kto"])
@pytest.mark.parametrize("bounds", BOUNDS)
def test_bounds_that_change_places_would_not_pass(tmp_path, loss, bounds):
    start = make_policy(lora=False)
    trainer, lines, segment = trained(tmp_path, loss, 3, bounds, start)
    wrong, _ = two_models(trainer, copy.deepcopy(start), segment, 3, (-bounds[1], -bounds[0]))
    assert [line["loss"] for line in lines] != wrong
