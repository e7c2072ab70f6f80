"""A reference that stays k steps behind, a ratio to the policy that wrote the tokens, and a KL term that is
anchored to the initial weights, against plain training that keeps every earlier policy."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from common.errors import ConfigError
from config.schema import Config
from data.batches import Segment
from data.types import Sequences
from jobs.initial_scores import initial_scores
from models.policy import Policy
from models.reference import Reference
from tests.engine import Log, engine_config, make_segment, make_trainer, run, weights
from tests.integration.test_two_models import make_policy
from tests.second_model import INFINITE, Bounds, Rounds, SecondModel, assert_identical, train_rounds
from tests.tiny import tiny_policy
from trainers.assembly import Offline, check_correction
from trainers.basic import BasicTrainer
from trainers.losses.base import TokenScores

LOW, HIGH = -0.05, 0.02
CLIPPED = ("humanline=true", f"log_epsilon_P={LOW}", f"log_epsilon_R={HIGH}")


def config_of(folder, *words: str):
    cut = ("model.batch_size=8", "model.microbatches=2", "loss.beta=0.5")
    return engine_config(folder, "grpo", *cut, *words)


class Behind(SecondModel):
    """The reference of a segment's step t is the policy of its step ``behind(t)``. ``anchor``: the KL term's
    is the ``initial`` policy, or the reference where ratios are against log mu if it is known
    (``behavior``)."""

    def __init__(
        self, trainer: BasicTrainer, policy: Policy, behind: Callable[[int], int], anchor: str = ""
    ) -> None:
        self.behind, self.anchor, self.initial = behind, anchor, copy.deepcopy(policy)
        super().__init__(trainer, policy, (LOW, HIGH) if trainer.config.humanline else INFINITE)

    def begin(self) -> None:
        super().begin()
        self.earlier = [self.reference]

    def scores(self, sequences: Sequences, bounds: Bounds) -> TokenScores:
        found = super().scores(sequences, bounds)
        if self.anchor == "initial":
            with torch.no_grad():
                return replace(found, anchor=self.initial(sequences))
        if self.anchor == "behavior" and (mu := sequences.behavior_logprobs) is not None:
            old = torch.where(mu.isnan(), found.reference, mu)
            ratio = (found.policy - old).clamp(*bounds)
            return replace(found, reference=old, log_ratio=ratio, anchor=found.reference)
        return found

    def move(self, t: int, updated: bool) -> None:
        if updated:
            self.earlier.append(copy.deepcopy(self.policy))
            self.reference = self.earlier[self.behind(t + 1)]


@pytest.mark.parametrize(("k", "steps", "clipped"), [(1, 6, False), (3, 6, True), (10, 12, False)])
def test_delayed_is_bit_identical_to_keeping_every_policy(tmp_path, k, steps, clipped):
    words = ("sync_mode=delayed", f"sync_freq={k}", *(CLIPPED if clipped else ()))
    rounds = ("online=true", "reward=adder", "rounds.contexts_per_round=8")
    config = config_of(tmp_path, *words, *rounds)
    segments = [make_segment(config, pairs=4 * steps, seed=s) for s in (3, 4)]
    trainer, lines = train_rounds(config, tiny_policy(), *segments)
    assert_identical(trainer, lines, Behind(trainer, tiny_policy(), lambda t: max(0, t - k)), *segments)
    ages = [t - max(0, t - k) for t in range(steps)]
    assert [line["step"] - line["reference_step"] for line in lines] == ages * 2
    assert len(trainer.reference.scores) == 0, "nothing is kept of steps that are over"


def test_one_step_behind_is_humanline_to_the_bit_and_three_are_not(tmp_path):
    found = {}
    for name, words in {
        "humanline": (),
        "delayed": ("sync_mode=delayed",),
        "three behind": ("sync_mode=delayed", "sync_freq=3"),
        "every third": ("sync_freq=3",),
    }.items():
        config = config_of(tmp_path, *CLIPPED, *words)
        trainer, lines = run(config, make_segment(config, pairs=4 * 7))
        kept = ("loss", "grad_norm", "kl", "reference_step", "clipped_low")
        found[name] = [{key: line[key] for key in kept} for line in lines], weights(trainer)
    assert found["humanline"][0] == found["delayed"][0]
    assert all(torch.equal(w, found["delayed"][1][name]) for name, w in found["humanline"][1].items())
    losses = [tuple(line["loss"] for line in lines) for lines, _ in found.values()]
    assert len(set(losses)) == 3


def with_behavior(segment: Segment) -> Segment:
    """The segment with log mu of two tokens in three of every second row, far from the policy's."""
    rng = np.random.default_rng(7)

    def row(r, known):
        mu = rng.normal(-3.5, 1.0, len(r.completion_ids)).astype(np.float32)
        mu[rng.random(len(mu)) < 1 / 3] = np.nan
        return replace(r, behavior_logprobs=mu) if known else r

    groups = tuple(
        tuple(replace(e, rows=tuple(row(r, i % 2) for r in e.rows)) for i, e in enumerate(group))
        for group in segment.groups
    )
    return replace(segment, groups=groups)


@pytest.mark.parametrize(("shape", "clipped"), [("ppo", True), ("dppo", False)])
def test_a_ratio_to_the_behaviour_policy_is_bit_identical_to_plain_training(tmp_path, shape, clipped):
    words = (f"loss.shape={shape}", "sync_mode=delayed", *(CLIPPED if clipped else ()))
    config = config_of(tmp_path, "ratio_reference=behavior", *words)
    segment = with_behavior(make_segment(config, pairs=4 * 5))
    trainer, lines = run(config, segment)
    plain = Behind(trainer, tiny_policy(), lambda t: max(0, t - 1), "behavior")
    assert_identical(trainer, lines, plain, segment)
    other = run(config_of(tmp_path, *words), segment)[1]
    assert other[0]["kl"] == 0 != lines[0]["kl"], "the ratio's reference is another"
    assert other[0]["kl_penalty"] == 0 == lines[0]["kl_penalty"], "the KL term's is not"


def test_a_ratio_to_a_policy_that_nobody_recorded_is_refused(tmp_path):
    config = config_of(tmp_path, "ratio_reference=behavior")
    segment = make_segment(config, pairs=8)
    check_correction(config, with_behavior(segment))
    with pytest.raises(ConfigError, match="ratio_reference=behavior"):
        check_correction(config, segment)


# -- a KL term that is anchored to the initial weights ---------------------------------------------

ROUNDS = ("online=true", "reward=adder", "rounds.contexts_per_round=8")


def trained(config: Config, start: Policy, segments: list[Segment]) -> tuple[BasicTrainer, list[dict]]:
    if config.online:
        return train_rounds(config, start, *segments)
    trainer, log = make_trainer(config, copy.deepcopy(start)), Log()
    batches = [segments[0].batch(i) for i in range(segments[0].steps)]
    known = initial_scores(trainer, batches, trainer.dealer.size, Reference(), {"weights": "anchor"}, "score")
    trainer.reference.use_initial(known, {})
    trainer.train(Offline(*segments), log)
    return trainer, log.lines


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("humanline", [False, True], ids=["plain", "humanline"])
@pytest.mark.parametrize("online", [False, True], ids=["offline", "online"])
def test_an_initial_anchor_is_bit_identical_to_a_third_model(tmp_path, online, humanline, lora):
    words = (*CLIPPED, "sync_freq=2") * humanline + ROUNDS * online
    config, start = config_of(tmp_path, "loss.kl_anchor=initial", *words), make_policy(lora)
    segments = [make_segment(config, pairs=4 * 4, seed=seed) for seed in ((3, 4) if online else (3,))]
    trainer, lines = trained(config, start, segments)
    behind = lambda t: max(0, t - 1) // 2 * 2 if humanline else 0  # noqa: E731
    plain = Behind(trainer, copy.deepcopy(start), behind, "initial")
    assert_identical(trainer, lines, plain, *segments)
    alone = not online and not humanline
    assert (trainer.reference.anchor is None) == alone, "the reference is the initial model"
    if not alone:
        moving = config_of(tmp_path, "loss.kl_anchor=reference", *words)
        other = trained(moving, start, segments)[1]
        assert other[-1]["kl_penalty"] < lines[-1]["kl_penalty"], "the anchor stays where it was"
    if lora and online:  # the anchor is the base model with the adapters at their start, which take no room
        kept = sum(b.numel() for b in trainer.reference.initial.buffers())
        assert kept < sum(p.numel() for p in start.parameters()) / 2


def test_a_round_goes_on_with_its_anchors_scores(tmp_path):
    words = ("loss.kl_anchor=initial", *CLIPPED, "sync_freq=2", *ROUNDS)
    config, found = config_of(tmp_path, *words), dict[str, Any]()
    rounds = Rounds(*(make_segment(config, pairs=4 * 4, seed=seed) for seed in (3, 4)))
    trainer, log = make_trainer(config), Log()

    def keep() -> None:
        if trainer.progress.step == 6:
            found["optimizer"] = copy.deepcopy(trainer.optimizer.state_dict())
            found["weights"] = {k: v.clone() for k, v in trainer.policy.state_dict().items()}
            found["own"] = copy.deepcopy(trainer.state_dict()), trainer.reference.state()

    log.each = keep
    trainer.train(rounds, log)
    resumed, rest = make_trainer(config), Log()
    resumed.policy.load_state_dict(found["weights"])
    resumed.optimizer.load_state_dict(found["optimizer"])
    resumed.load_state_dict(*found["own"])
    resumed.train(rounds, rest)
    assert [line["loss"] for line in rest.lines] == [line["loss"] for line in log.lines[6:]]
