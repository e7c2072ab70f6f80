"""The step: which weights the reference has when, one normaliser, and no effect of how a batch is cut."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from transformers.optimization import (
    get_constant_schedule_with_warmup,
    get_cosine_schedule_with_warmup,
    get_cosine_with_min_lr_schedule_with_warmup,
    get_linear_schedule_with_warmup,
)

from data.balance import share_tokens
from data.batches import Segment, microbatch, size_of
from models.distributed import start
from models.policy import decoder_blocks
from models.reference import Reference, score, sequences_of
from models.sharding import local, shard
from tests.engine import engine_config, first_gradient, make_segment, make_trainer, run, weights
from tests.tiny import random_groups, tiny_policy
from tests.unit.trainers.test_syncing import BEFORE
from trainers import basic
from trainers.optimizer import lr_factor, update


@pytest.mark.parametrize("k", [1, 2, 4])
def test_which_weights_the_reference_has_at_which_step(tmp_path, k):
    """Without humanline it stays."""
    table = BEFORE[k][:6]
    config = engine_config(tmp_path, "dpo", "model.batch_size=2", "humanline=true", f"sync_freq={k}")
    segment, trainer = make_segment(config, pairs=2 * len(table)), make_trainer(config)
    snapshots, found = [], []

    def before_each_step():
        """Which earlier weights give exactly the log-probabilities that the reference holds for this step's
        batch?"""
        step, last_sync = len(snapshots), table[len(snapshots)]
        kept = {int(key.split("/")[0]) for key in trainer.reference.scores}
        assert min(kept) == (last_sync + 1 if step else 0), "scores of the reference before are forgotten"
        snapshots.append({n: local(p.detach()).clone() for n, p in trainer.policy.named_parameters()})
        sequences = trainer.dealer.microbatches(segment.batch(trainer.progress.position))[0].sequences
        held = trainer.reference.lookup(trainer.progress.step, sequences)
        matching = []
        for step, snapshot in enumerate(snapshots):
            other = tiny_policy()
            other.load_state_dict(snapshot, strict=False)
            if torch.equal(score(other, sequences), held):
                matching.append(step)
        found.append(matching)

    _, lines = run(config, segment, trainer, before_each_step)
    assert [f[0] for f in found] == table and all(len(f) == 1 for f in found)
    assert [line["reference_step"] for line in lines] == table
    plain = engine_config(tmp_path, "dpo", "model.batch_size=2")
    _, lines = run(plain, make_segment(plain, pairs=8))
    assert [line["reference_step"] for line in lines] == [0] * 4
    assert lines[0]["kl"] == 0.0 and lines[-1]["kl"] != 0.0


CUTS = (
    *((parts, ranks, None, False) for parts, ranks in ((1, 1), (4, 1), (8, 1), (1, 2), (2, 2), (2, 4))),
    *((1, 1, 60, False), (1, 2, 60, False), (2, 1, None, True), (1, 2, 45, True)),
)
"""(parts, ranks, tokens a microbatch, whether prompts are computed once for all rows)"""


@pytest.mark.parametrize("loss", ["dpo", "kto", "grpo", "sft"])
def test_the_gradient_does_not_depend_on_how_the_batch_is_cut(tmp_path, loss):
    """Microbatches of 8, 4, 2 and 1, or of so many tokens, on one rank and dealt to 2 and 4, with prompts
    computed once for each row or once for all, give the same loss and gradient of the same global batch,
    KTO's KL included; a rank finds the scores of its rows among those that it made."""
    gradients, losses = [], []
    for parts, ranks, tokens, share in CUTS:
        packing = ranks > 1 or share
        config = engine_config(
            tmp_path / f"{parts}-{ranks}-{tokens}-{share}",
            loss,
            "model.batch_size=8",
            f"model.microbatch_tokens={'null' if tokens is None else tokens}",
            f"model.microbatches={parts}",
            f"model.packing={str(packing).lower()}",
            f"model.share_prompts={str(share).lower()}",
            *(["humanline=true"] if loss != "sft" else []),
        )
        trainer = make_trainer(config)
        segment = make_segment(config, pairs=5, longest=20)  # a short last batch too
        batch, micros, other = segment.batch(0), [], Reference()
        trainer.dealer.size = size_of(config.model, ranks)
        for rank in range(ranks):
            dealer, own = copy.copy(trainer.dealer), Reference()
            dealer.world = replace(trainer.world, rank=rank, size=ranks)
            initial = tiny_policy(seed=3)
            initial.use_packed_attention()
            own.refresh(initial, 0, dealer.upcoming(segment, 0, 0, math.inf))
            mine = dealer.microbatches(batch)
            for sequences in sequences_of(mine):
                own.lookup(0, sequences)  # KeyError for a row that another rank has scored
            micros, other.scores = micros + mine, {**other.scores, **own.scores}
        assert trainer.dealer.packing == packing and len(micros) % ranks == 0
        assert any(micro.sequences.packed and micro.sequences.packed.shares for micro in micros) == share
        if tokens is not None:
            assert len(micros) > ranks, "more than one slot"
            assert max(share_tokens(micro.examples, packing, share) for micro in micros) <= tokens
        gradient, total, _ = first_gradient(trainer, batch, micros, other)
        losses.append(total)
        gradients.append(gradient)
    assert gradients[0].norm() > 1e-3
    for gradient, total in zip(gradients[1:], losses[1:], strict=True):
        assert (gradient - gradients[0]).norm() / gradients[0].norm() < 1e-6
        assert abs(total - losses[0]) < 1e-6 * max(1, abs(losses[0]))


@pytest.mark.parametrize("name", ["AdamW", "torch.optim.SGD", "torch.optim.RMSprop", "torch.optim.Adam"])
def test_an_optimizer_gets_the_numbers_that_it_takes(tmp_path, name):
    """For each weight, once. It makes no step with a gradient that is not finite."""
    words = ("beta1=0.8", "beta2=0.95", "eps=1e-7", "weight_decay=0.03", "lr=0.002")
    trainer = make_trainer(engine_config(tmp_path, "dpo", f"optimizer={name}", *words))
    groups = trainer.optimizer.param_groups
    assert {(g["lr"], g["weight_decay"]) for g in groups} == {(0.002, 0.03)}
    assert {(g.get("betas", (0.8, 0.95)), g.get("eps", 1e-7)) for g in groups} == {((0.8, 0.95), 1e-7)}
    held = [id(p) for group in groups for p in group["params"]]
    assert sorted(held) == sorted(id(p) for p in trainer.policy.parameters())
    before = weights(trainer)
    for skip, moved in ((1.0, False), (0.0, True)):
        for p in trainer.policy.parameters():
            p.grad = torch.full_like(p, torch.nan if skip else 1.0)
        update(trainer.optimizer, 1e-2, torch.tensor(skip))
        assert any(not torch.equal(before[n], w) for n, w in weights(trainer).items()) is moved


@pytest.mark.parametrize("steps", [1, 2, 10, 100])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 1.0])
def test_after_the_warm_up_the_schedules_are_those_of_transformers(tmp_path, steps, share):
    warm, plan = round(share * steps), Segment(random_groups(7), 3, 3 * steps, seed=1)
    decaying = {"num_warmup_steps": warm, "num_training_steps": steps}
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    for named, theirs in {
        "constant": get_constant_schedule_with_warmup(optimizer, warm),
        "linear": get_linear_schedule_with_warmup(optimizer, **decaying),
        "cosine": get_cosine_schedule_with_warmup(optimizer, **decaying),
        "cosine min_lr_ratio=0.2": get_cosine_with_min_lr_schedule_with_warmup(
            optimizer, **decaying, min_lr_rate=0.2
        ),
    }.items():
        words = (f"warmup={warm / steps}", *f"scheduler={named}".split(), "model.batch_size=3")
        config, factor = engine_config(tmp_path, "dpo", *words), theirs.lr_lambdas[0]
        ours = [lr_factor(plan.done(i), plan.done(i + 1), config) for i in range(steps)]
        wanted = [(i + 1) / warm if i < warm else factor(i) for i in range(steps)]
        assert ours == pytest.approx(wanted, abs=1e-9) and min(ours) > 0
    within = engine_config(tmp_path, "dpo", f"warmup={min(1.0, (warm + 0.5) / steps)}", "model.batch_size=3")
    factors = [lr_factor(plan.done(i), plan.done(i + 1), within) for i in range(steps)]
    assert max(factors) <= 1, "also where the warm-up ends within a step"


@pytest.mark.parametrize("again", [True, False])
def test_nothing_stale_after_a_no_grad_forward(again):
    """FSDP2 leaves the root whole after a no-grad forward, and the blocks that stay gathered; without
    resharding, the forward after an update uses stale weights."""
    policy, plain, world = tiny_policy(), tiny_policy(), start()
    shard(policy, decoder_blocks(policy.model), world, torch.float32, again)
    sequences = microbatch([g[0] for g in random_groups(4)], world.device).sequences
    score(policy, sequences)
    with torch.no_grad():
        for p in (*policy.parameters(), *plain.parameters()):
            p.mul_(1.1)
    assert torch.allclose(score(policy, sequences), score(plain, sequences), atol=1e-6)


@pytest.mark.parametrize("more", [[], ["model.dtype=bfloat16"], ["model.reshard_after_forward=false"]])
def test_one_rank_adds_gradients_up_as_if_each_turn_were_reduced(tmp_path, monkeypatch, more):
    """The same bits: FSDP's copy of every slot's gradients, added up there, is the slow twin."""
    found, syncs = [], []
    sync = FSDPModule.set_requires_gradient_sync

    def noted(policy, needed, **other):
        syncs.append(needed)
        sync(policy, needed, **other)

    monkeypatch.setattr(FSDPModule, "set_requires_gradient_sync", noted)
    for slots in (basic.reduced_once, lambda policy, world, slots: iter(slots)):
        monkeypatch.setattr(basic, "reduced_once", slots)
        config = engine_config(tmp_path, "dpo", "model.batch_size=8", "model.microbatches=4", *more)
        trainer = make_trainer(config, tiny_policy())
        run(config, make_segment(config, pairs=24), trainer)
        found.append(weights(trainer))
    assert syncs == [False, False, False, True] * 3
    assert all(torch.equal(weight, found[1][name]) for name, weight in found[0].items())
