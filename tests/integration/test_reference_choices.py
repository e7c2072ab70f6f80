"""A reference that stays k steps behind, and a ratio to the policy that wrote the tokens, against plain
training that keeps every earlier policy."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from common.errors import ConfigError
from data.batches import Segment
from tests.engine import Log, engine_config, make_segment, make_trainer, run, weights
from tests.integration.test_sync_modes import Rounds
from tests.tiny import tiny_policy
from trainers.assembly import check_correction, make_loss
from trainers.basic import BasicTrainer
from trainers.losses.base import TokenScores

LOW, HIGH = -0.05, 0.02
CLIPPED = ("humanline=true", f"log_epsilon_P={LOW}", f"log_epsilon_R={HIGH}")


def config_of(folder, *words: str):
    cut = ("model.batch_size=8", "model.microbatches=2", "loss.beta=0.5")
    return engine_config(folder, "grpo", *cut, *words)


def live(
    trainer: BasicTrainer,
    policy,
    segments,
    behind: Callable[[int], int],
    bounds: tuple[float, float] | None = None,
    anchor: str = "",
) -> list[float]:
    """Losses of plain training in which the reference of a segment's step t is the policy of its step ``behind(t)``.
    ``trainer`` only cuts the batches. ``anchor``: the KL term's is the ``initial`` policy, or the reference where
    ratios are against log mu if it is known (``behavior``)."""  # noqa: E501
    config, loss, losses, initial = trainer.config, make_loss(trainer.config), [], copy.deepcopy(policy)
    params = [p for p in policy.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=config.lr, eps=config.eps, weight_decay=0.01, fused=True)
    for segment in segments:
        earlier = []
        for t, batch in enumerate(map(segment.batch, range(segment.steps))):
            earlier.append(copy.deepcopy(policy))
            total, tokens = 0.0, sum(len(r.completion_ids) for e in batch for r in e.rows)
            for m in trainer.dealer.microbatches(batch):
                p = policy(m.sequences)
                with torch.no_grad():
                    r = earlier[behind(t)](m.sequences)
                    anchored = {"": None, "behavior": r, "initial": initial(m.sequences)}[anchor]
                old, mu = r, m.sequences.behavior_logprobs
                if anchor == "behavior" and mu is not None:
                    old = torch.where(mu.isnan(), r, mu)
                ratio = p - old if bounds is None else (p - old).clamp(*bounds)
                scores = TokenScores(p, old, ratio, m.sequences.mask, anchor=anchored)
                result = loss(scores, m.labels)
                (result.total * (1 / tokens)).backward()
                total += float(result.total.detach().double())
            torch.nn.utils.clip_grad_norm_(params, config.model.max_grad_norm)
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
    behind = lambda t: max(0, t - k)  # noqa: E731
    assert [line["loss"] for line in log.lines] == live(
        trainer, plain, segments, behind, (LOW, HIGH) if clipped else None
    )
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
    bounds = (LOW, HIGH) if clipped else None
    expected = live(trainer, plain, [segment], lambda t: max(0, t - 1), bounds, "behavior")
    assert [line["loss"] for line in lines] == expected
    other = run(config_of(tmp_path, *words), segment)[1]
    assert other[0]["kl"] == 0 != lines[0]["kl"], "the ratio's reference is another"
    assert other[0]["kl_penalty"] == 0 == lines[0]["kl_penalty"], "the KL term's is not"


def test_a_ratio_to_a_policy_that_nobody_recorded_is_refused(tmp_path):
    config = config_of(tmp_path, "ratio_reference=behavior")
    segment = make_segment(config, pairs=8)
    check_correction(config, with_behavior(segment))
    with pytest.raises(ConfigError, match="ratio_reference=behavior"):
        check_correction(config, segment)
