"""A KL term that is anchored to the initial weights, against plain training with two further live models, the
reference and the anchor, bit for bit: offline and over rounds, with and without LoRA and humanline."""

from __future__ import annotations

import copy
import re

import pytest
import torch

from config.schema import Config
from jobs.initial_scores import initial_scores
from jobs.memory import plan_run
from models.policy import Policy
from models.reference import Reference
from tests.engine import Log, engine_config, make_segment, make_trainer, weights
from tests.integration.test_reference_choices import live
from tests.integration.test_sync_modes import Rounds
from tests.integration.test_two_models import make_policy
from tests.tiny import tiny_llama
from trainers.assembly import Offline
from trainers.basic import BasicTrainer

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


def trained(config: Config, start: Policy, segments) -> tuple[BasicTrainer, list[dict]]:
    trainer, log = make_trainer(config, copy.deepcopy(start)), Log()
    if not config.online:
        batches = [segments[0].batch(i) for i in range(segments[0].steps)]
        known = initial_scores(
            trainer, batches, trainer.dealer.size, Reference(), {"weights": "anchor"}, "score"
        )
        trainer.reference.use_initial(known, {})
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
    behind = lambda t: max(0, t - 1) // 2 * 2 if humanline else 0  # noqa: E731
    bounds = (LOW, HIGH) if humanline else None
    assert [line["loss"] for line in lines] == live(trainer, plain, segments, behind, bounds, "initial")
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
