"""A reference that stays k steps behind, and a ratio to the policy that wrote the tokens, against plain
training that keeps every earlier policy."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch

from common.errors import ConfigError
from data.batches import Segment
from tests.engine import Log, engine_config, make_segment, make_trainer, run, weights
from tests.integration.test_sync_modes import Rounds
from tests.tiny import tiny_policy
from trainers.assembly import Offline, make_loss
from trainers.basic import BasicTrainer
from trainers.corrections import check_correction
from trainers.losses.base import TokenScores

LOW, HIGH = -0.05, 0.02
CLIPPED = ("humanline=true", f"log_epsilon_P={LOW}", f"log_epsilon_R={HIGH}")


def config_of(folder, *words: str):
    cut = ("model.batch_size=8", "model.microbatches=2", "loss.beta=0.5")
    return engine_config(folder, "grpo", *cut, *words)


def live(
    trainer: BasicTrainer, policy, segments, k: int, clipped: bool, behavior: bool = False
) -> list[float]:
    """Losses of plain training in which the reference of step t is the policy of step t - k, or of the
    segment's start. With ``behavior`` ratios are against log mu where it is known, the KL against the
    reference."""
    config, loss, losses = trainer.config, make_loss(trainer.config), []
    optimizer = torch.optim.AdamW(
        policy.parameters(), lr=config.lr, eps=config.eps, weight_decay=0.01, fused=True
    )
    for segment in segments:
        earlier = []
        for batch in map(segment.batch, range(segment.steps)):
            earlier.append(copy.deepcopy(policy))
            total, tokens = 0.0, sum(len(r.completion_ids) for e in batch for r in e.rows)
            for m in trainer.dealer.microbatches(batch):
                p = policy(m.sequences)
                with torch.no_grad():
                    r = earlier[max(0, len(earlier) - 1 - k)](m.sequences)
                old, mu = r, m.sequences.behavior_logprobs
                if behavior and mu is not None:
                    old = torch.where(mu.isnan(), r, mu)
                ratio = (p - old).clamp(LOW, HIGH) if clipped else p - old
                scores = TokenScores(p, old, ratio, m.sequences.mask, anchor=r if behavior else None)
                result = loss(scores, m.labels)
                (result.total * (1 / tokens)).backward()
                total += float(result.total.detach().double())
            torch.nn.utils.clip_grad_norm_(policy.parameters(), config.model.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(total / tokens)
    return losses


@pytest.mark.parametrize(("k", "steps", "clipped"), [(1, 6, False), (3, 6, True), (10, 12, False)])
def test_delayed_is_bit_identical_to_keeping_every_policy(tmp_path, k, steps, clipped):
    words = ("sync_mode=delayed", f"sync_freq={k}", *(CLIPPED if clipped else ()))
    rounds = ("online=true", "reward=adder", "rounds.contexts_per_round=8")
    config = config_of(tmp_path, *words, *rounds)
    segments, plain = [make_segment(config, pairs=4 * steps, seed=s) for s in (3, 4)], tiny_policy()
    trainer, log = make_trainer(config, copy.deepcopy(plain)), Log()
    trainer.train(Rounds(*segments), log)
    assert [line["loss"] for line in log.lines] == live(trainer, plain, segments, k, clipped)
    final = weights(trainer)
    assert all(torch.equal(final[name], p.detach()) for name, p in plain.named_parameters())
    ages = [t - max(0, t - k) for t in range(steps)]
    assert [line["step"] - line["reference_step"] for line in log.lines] == ages * 2
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


def test_delayed_goes_on_where_it_was(tmp_path):
    config = config_of(tmp_path, "sync_mode=delayed", "sync_freq=3")
    segment, found = make_segment(config, pairs=4 * 7), {}
    trainer, log = make_trainer(config), Log()

    def keep() -> None:
        if trainer.progress.step == 4:
            found.update(
                policy=copy.deepcopy(trainer.policy.state_dict()), own=copy.deepcopy(trainer.state_dict())
            )
            found.update(
                optimizer=copy.deepcopy(trainer.optimizer.state_dict()), scores=trainer.reference.state()
            )

    log.each = keep
    trainer.train(Offline(segment), log)
    resumed, rest = make_trainer(config), Log()
    resumed.policy.load_state_dict(found["policy"])
    resumed.optimizer.load_state_dict(found["optimizer"])
    resumed.load_state_dict(found["own"], found["scores"])
    resumed.train(Offline(segment), rest)
    assert [line["loss"] for line in rest.lines] == [line["loss"] for line in log.lines[4:]]


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
    segment, plain = with_behavior(make_segment(config, pairs=4 * 5)), tiny_policy()
    trainer, lines = run(config, segment, make_trainer(config, copy.deepcopy(plain)))
    assert [line["loss"] for line in lines] == live(trainer, plain, [segment], 1, clipped, behavior=True)
    other = run(config_of(tmp_path, *words), segment)[1]
    assert other[0]["kl"] == 0 != lines[0]["kl"], "the ratio's reference is another"
    assert other[0]["kl_penalty"] == 0 == lines[0]["kl_penalty"], "the KL term's is not"


def test_a_ratio_to_a_policy_that_nobody_recorded_is_refused(tmp_path):
    config = config_of(tmp_path, "ratio_reference=behavior")
    segment = make_segment(config, pairs=8)
    check_correction(config, with_behavior(segment))
    with pytest.raises(ConfigError, match="ratio_reference=behavior"):
        check_correction(config, segment)
