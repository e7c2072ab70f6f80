"""The reference without weights, against the plain thing: a second model, synced by copying.

Losses of every step and the final weights are bit-identical, for every loss, with and without humanline, with and without LoRA.
"""

from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model

from data.batches import Segment
from jobs.assembly import make_loss
from models.policy import Policy
from tests.engine import engine_config, make_segment, make_trainer, run, weights
from tests.tiny import tiny_llama
from trainers.basic import BasicTrainer
from trainers.losses.base import TokenScores

STEPS, LR = 7, 0.003


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


def two_models(
    trainer: BasicTrainer, policy: Policy, segment: Segment, k: int | None, sync_after_step: bool = False
) -> list[float]:
    """Plain training with a live second model, in the order of the paper's listing (C.2.1). ``trainer`` only cuts the batches."""
    config, loss = trainer.config, make_loss(trainer.config)
    reference = copy.deepcopy(policy)
    params = [p for p in policy.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        params, lr=LR, betas=(0.9, 0.999), eps=config.eps, weight_decay=config.weight_decay, fused=True
    )
    low, high = (-1.5, 1.5) if k else (-float("inf"), float("inf"))
    losses = []

    def scores(sequences):
        p = policy(sequences)
        with torch.no_grad():
            r = reference(sequences)
        return TokenScores(p, r, (p - r).clamp(low, high), sequences.mask)

    for t in range(segment.steps):
        batch = segment.batch(t)
        micros = trainer.microbatches(batch)
        tokens = sum(len(r.completion_ids) for e in batch for r in e.rows)
        units = tokens if config.loss["name"] == "grpo" else len(batch)
        total = torch.zeros((), dtype=torch.float64)
        if config.loss["name"] == "kto":
            with torch.no_grad():
                each = torch.cat([scores(m.mismatched).sequence_log_ratio().double() for m in micros])
            z0 = (each.sum() / len(each)).clamp(min=0).float()
        for m in micros:
            s = scores(m.sequences)
            if config.loss["name"] == "dpo":
                result = loss(*s.split(len(m.examples)))
            elif config.loss["name"] == "kto":
                result = loss(s, m.labels > 0, z0)
            else:
                result = loss(s, m.labels)
            (result.total * (1 / units)).backward()
            total += result.total.detach().double()
        torch.nn.utils.clip_grad_norm_(params, config.model.max_grad_norm)
        if k and t % k == 0 and not sync_after_step:
            reference.load_state_dict(policy.state_dict())
        optimizer.step()
        optimizer.zero_grad()
        if k and t % k == 0 and sync_after_step:
            reference.load_state_dict(policy.state_dict())
        losses.append(float(total / units))
    return losses


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("k", [None, 1, 3])
@pytest.mark.parametrize("loss", ["dpo", "kto", "grpo"])
def test_bit_identical_to_a_second_model(tmp_path, loss, k, lora):
    units = 4 if loss == "dpo" else 8
    humanline = [f"sync_freq={k}", "humanline=true"] if k else ["humanline=false"]
    config = engine_config(
        tmp_path, loss, f"model.batch_size={units}", "model.gradient_accumulation_steps=2", *humanline
    )
    segment = make_segment(config, pairs=4 * STEPS)
    start = make_policy(lora)
    plain = copy.deepcopy(start)
    trainer, lines = run(config, segment, make_trainer(config, copy.deepcopy(start)))
    expected = two_models(trainer, plain, segment, k)
    assert [line["loss"] for line in lines] == expected
    final = weights(trainer)
    for name, p in plain.named_parameters():
        assert torch.equal(final[name], p.detach()), name
    assert any(
        not torch.equal(p.detach(), q.detach())
        for p, q in zip(plain.parameters(), start.parameters(), strict=True)
    )
    assert lines[-1]["loss"] != lines[0]["loss"]


@pytest.mark.parametrize("k", [1, 3])
def test_another_order_would_not_pass(tmp_path, k):
    """Syncing after the optimizer step (trust-region style) gives other losses: the test above can fail."""
    config = engine_config(tmp_path, "dpo", "model.batch_size=4", "humanline=true", f"sync_freq={k}")
    segment = make_segment(config, pairs=4 * STEPS)
    start = make_policy(lora=False)
    trainer, lines = run(config, segment, make_trainer(config, copy.deepcopy(start)))
    after = two_models(trainer, copy.deepcopy(start), segment, k, sync_after_step=True)
    assert [line["loss"] for line in lines] != after
    if k == 1:  # the reference always equals the policy: ln 2 for ever
        assert after == pytest.approx([0.6931472] * STEPS, abs=1e-6)
