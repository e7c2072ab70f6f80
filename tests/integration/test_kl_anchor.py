"""A KL term that is anchored to the initial weights, against plain training with two further live models, the
reference and the anchor, bit for bit: offline and over rounds, with and without LoRA and humanline."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from peft import LoraConfig, get_peft_model

from config.schema import Config
from jobs.initial_scores import initial_scores
from jobs.memory import plan_run
from models.policy import Policy
from models.reference import Reference
from models.soft_reference import SoftReference
from tests.engine import Log, engine_config, make_segment, make_trainer, weights
from tests.integration.test_sync_modes import Rounds
from tests.integration.test_two_models import make_policy
from tests.tiny import tiny_llama
from trainers.assembly import Offline, make_loss
from trainers.basic import BasicTrainer
from trainers.losses.base import TokenScores

LOW, HIGH = -0.02, 0.05


def config_of(folder, online: bool, humanline: bool, *more: str) -> Config:
    words = ["loss.beta=0.5", "loss.kl_anchor=initial", "model.batch_size=8", *more]
    words += ["online=true", "reward=adder", "rounds.contexts_per_round=8"] if online else []
    words += (
        ["humanline=true", "sync_freq=2", f"log_epsilon_P={LOW}", f"log_epsilon_R={HIGH}"]
        if humanline
        else []
    )
    return engine_config(folder, "grpo", "model.microbatches=2", *words)


def live(trainer: BasicTrainer, policy: Policy, segments, humanline: bool) -> list[float]:
    """Losses of plain training: the reference moves by the listing (C.2.1) and at every round's start, the
    anchor never. ``trainer`` only cuts the batches."""
    config, loss = trainer.config, make_loss(trainer.config)
    anchor, reference, losses, t = copy.deepcopy(policy), copy.deepcopy(policy), [], 0
    params = [p for p in policy.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=config.lr, eps=config.eps, weight_decay=0.01, fused=True)
    for segment in segments:
        reference.load_state_dict(policy.state_dict())
        for batch in map(segment.batch, range(segment.steps)):
            total, tokens = 0.0, sum(len(r.completion_ids) for e in batch for r in e.rows)
            for m in trainer.dealer.microbatches(batch):
                p = policy(m.sequences)
                with torch.no_grad():
                    r, a = reference(m.sequences), anchor(m.sequences)
                ratio = (p - r).clamp(LOW, HIGH) if humanline else p - r
                result = loss(TokenScores(p, r, ratio, m.sequences.mask, anchor=a), m.labels)
                (result.total * (1 / tokens)).backward()
                total += float(result.total.detach().double())
            torch.nn.utils.clip_grad_norm_(params, config.model.max_grad_norm)
            if humanline and t % 2 == 0:
                reference.load_state_dict(policy.state_dict())
            optimizer.step()
            optimizer.zero_grad()
            losses.append(total / tokens)
            t += 1
    return losses


def trained(config: Config, start: Policy, segments) -> tuple[BasicTrainer, list[dict]]:
    trainer, log = make_trainer(config, copy.deepcopy(start)), Log()
    if not config.online:
        batches = [segments[0].batch(i) for i in range(segments[0].steps)]
        known = initial_scores(
            trainer, batches, trainer.dealer.size, Reference(), {"weights": "anchor"}, "score"
        )
        trainer.reference.use_initial(known)
    trainer.train(Rounds(*segments) if config.online else Offline(*segments), log)
    return trainer, log.lines


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("humanline", [False, True], ids=["plain", "humanline"])
@pytest.mark.parametrize("online", [False, True], ids=["offline", "online"])
def test_bit_identical_to_live_models(tmp_path, online, humanline, lora):
    config, start = config_of(tmp_path, online, humanline), make_policy(lora)
    segments = [make_segment(config, pairs=4 * 4, seed=seed) for seed in ((3, 4) if online else (3,))]
    plain = copy.deepcopy(start)
    trainer, lines = trained(config, start, segments)
    assert [line["loss"] for line in lines] == live(trainer, plain, segments, humanline)
    final = weights(trainer)
    assert all(torch.equal(final[name], p.detach()) for name, p in plain.named_parameters())
    assert (trainer.reference.anchor is None) == (not online and not humanline), (
        "the reference is the initial model"
    )
    if trainer.reference.anchor is not None:
        moving = config_of(tmp_path, online, humanline, "loss.kl_anchor=reference")
        other = trained(moving, start, segments)[1]
        assert other[-1]["kl_penalty"] < lines[-1]["kl_penalty"], "the anchor stays where it was"
    if lora and online:  # the anchor is the base model with the adapters at their start, which take no room
        assert (
            sum(b.numel() for b in trainer.reference.initial.buffers())
            < sum(p.numel() for p in plain.parameters()) / 2
        )


def test_fresh_adapters_are_the_base_model_to_the_bit():
    policy = Policy(get_peft_model(tiny_llama(), LoraConfig(r=4, target_modules="all-linear"))).eval()
    config = engine_config("/nowhere", "grpo")
    rows = (
        make_trainer(config, policy).dealer.microbatches(make_segment(config, pairs=4).batch(0))[0].sequences
    )
    held = SoftReference(policy)
    with torch.no_grad():
        for p in (p for p in policy.parameters() if p.requires_grad):
            p.add_(0.1)
        moved = policy(rows)
        with held.in_place_of(policy):
            anchored = policy(rows)
        with policy.model.disable_adapter():
            off = policy(rows)
    assert torch.equal(anchored, off) and not torch.equal(moved, off)


def test_a_round_goes_on_with_its_anchors_scores(tmp_path):
    config, start = config_of(tmp_path, True, True), make_policy(False)
    segments = [make_segment(config, pairs=4 * 4, seed=seed) for seed in (3, 4)]
    found: dict = {}
    trainer, log = make_trainer(config, copy.deepcopy(start)), Log()

    def keep() -> None:
        if trainer.progress.step == 6:
            state = {k: v.clone() for k, v in trainer.policy.state_dict().items()}
            found.update(state=state, optimizer=copy.deepcopy(trainer.optimizer.state_dict()))
            found.update(own=copy.deepcopy(trainer.state_dict()), scores=trainer.reference.state())

    log.each = keep
    trainer.train(Rounds(*segments), log)
    resumed, rest = make_trainer(config, copy.deepcopy(start)), Log()
    resumed.policy.load_state_dict(found["state"])
    resumed.optimizer.load_state_dict(found["optimizer"])
    resumed.load_state_dict(found["own"], found["scores"])
    resumed.train(Rounds(*segments), rest)
    assert [line["loss"] for line in rest.lines] == [line["loss"] for line in log.lines[6:]]


def test_the_memory_plan_has_the_second_copy(tmp_path):
    tiny_llama().save_pretrained(tmp_path)
    said = []
    for anchor in ("reference", "initial"):
        words = (f"loss.kl_anchor={anchor}", f"model.name_or_path={tmp_path}")
        config = config_of(tmp_path, True, False, *words)
        segment = make_segment(config, pairs=4)
        plan = plan_run(config, segment, [], 1)
        said.append(re.search(r"weights ([\d.]+) (?:\+ reference ([\d.]+))?", plan.text).groups())
    (weights_alone, none), (weights_beside, copied) = said
    assert none is None and weights_alone == weights_beside == copied
