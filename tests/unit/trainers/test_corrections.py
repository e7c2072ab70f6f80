"""Corrections: weights against a few lines of numpy in float64, what is refused, and what stays as it is."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from common.errors import ConfigError
from data.batches import collate
from data.types import Sequence
from tests.tiny import make_config
from trainers.corrections import Behavior, Correction, with_sample_size
from trainers.losses import shapes
from trainers.losses.base import TokenScores
from trainers.losses.grpo import grpo
from trainers.losses.ppo import ppo

NAN = math.nan
LENGTHS = (5, 3, 4, 0)
KNOWN = ((1, 1, 1, 1, 1), (1, 0, 1), (0, 0, 0, 0), ())
"""Of the third row nothing is known; the fourth fills the batch up."""
LABELS = torch.tensor([0.7, -1.5, 0.0, 0.0], dtype=torch.float64)


def case(seed: int = 0, spread: float = 1.0):
    """(scores, microbatch, the same as lists of rows): float64, asymmetric."""
    rng, width = np.random.default_rng(seed), max(LENGTHS)
    rows = [[rng.normal(-1.0, spread, n) for n in LENGTHS] for _ in range(3)]
    rows[2] = [np.where(np.array(k, bool), v, NAN) for v, k in zip(rows[2], KNOWN, strict=True)]

    def grid(values, fill):
        return torch.tensor([[*v, *[fill] * (width - len(v))] for v in values], dtype=torch.float64)

    policy, reference, mu = grid(rows[0], 0.0), grid(rows[1], 0.0), grid(rows[2], NAN)
    mask = torch.arange(width)[None] < torch.tensor(LENGTHS)[:, None]
    scores = TokenScores(policy.requires_grad_(), reference, policy - reference, mask)
    sequences = SimpleNamespace(behavior_logprobs=mu)
    return scores, SimpleNamespace(sequences=sequences, labels=LABELS, examples=(0,) * len(LENGTHS)), rows


def correction(name: str, *words: str) -> Correction:
    return Correction.from_config(make_config("loss=grpo", f"correction={name}", *words))


def by_hand(name: str, low: float, high: float, delta: float, rows) -> list[list[float]]:
    """The weights of each row, one token after the other."""
    out = []
    for policy, reference, mu, advantage in zip(*rows, LABELS.tolist(), strict=True):
        rho = [1.0 if math.isnan(m) else math.exp(r - m) for r, m in zip(reference, mu, strict=True)]
        known = [i for i, m in enumerate(mu) if not math.isnan(m)]
        if name == "truncated":
            weights = [min(max(r, low), high) if i in known else 1.0 for i, r in enumerate(rho)]
        elif name == "masked":
            weights = [r if i not in known or low <= r <= high else 0.0 for i, r in enumerate(rho)]
        elif name == "sequence_masked":
            mean = math.prod(rho[i] for i in known) ** (1 / len(known)) if known else 1.0
            weights = rho if not known or low <= mean <= high else [0.0] * len(rho)
        elif name == "trust_region_masked":
            far = any(abs(policy[i] - mu[i]) > delta for i in known)
            weights = [0.0 if far else 1.0] * len(rho)
        else:
            away = sum(mu[i] - policy[i] for i in known) / max(len(known), 1)
            weights = [0.0 if advantage < 0 and away > delta else 1.0] * len(rho)
        out.append(weights)
    return out


@pytest.mark.parametrize(
    ("name", "low", "high", "delta"),
    [
        ("truncated", 0.3, 1.7, 0.1),
        ("truncated", 0.2, 0.9, 0.1),  # an unknown token's 1 lies outside
        ("masked", 0.4, 1.6, 0.1),
        ("sequence_masked", 0.8, 1.3, 0.1),
        ("sequence_masked", 1.1, 1.9, 0.1),
        ("negative_masked", 0.0, 2.0, 0.25),
        ("negative_masked", 0.0, 2.0, -0.25),
        ("trust_region_masked", 0.0, 2.0, 2.0),
        ("trust_region_masked", 0.0, 2.0, 1.2),
    ],
)
def test_weights_are_those_of_the_formula(name, low, high, delta):
    words = (f"correction.low={low}", f"correction.high={high}", f"correction.delta={delta}")
    corrected = correction(name, *words)
    for seed in range(8):
        scores, micro, rows = case(seed)
        weights = corrected.with_weights(scores, micro).weights
        assert weights is not None and not weights.requires_grad
        for found, wanted in zip(weights, by_hand(name, low, high, delta, rows), strict=True):
            assert found[: len(wanted)].tolist() == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("coefficient", [0.0, 0.3])
def test_a_weight_multiplies_ppos_policy_term_and_not_its_penalty(coefficient):
    """The gradient with weights is w times that without, token by token; the KL penalty's stays."""
    scores, micro, _ = case(3, spread=0.1)
    truncated = correction("truncated", "correction.low=0.9", "correction.high=1.05")
    weights = truncated.with_weights(scores, micro).weights

    def gradient(w, coefficient):
        total = ppo(replace(scores, weights=w), LABELS, cliprange=0.5, KL_coef=coefficient).total
        return torch.autograd.grad(total, scores.policy, retain_graph=True)[0]

    plain, found = (gradient(w, coefficient) for w in (None, weights))
    penalty = plain - gradient(None, 0.0)
    assert torch.allclose(found, weights * gradient(None, 0.0) + penalty, atol=1e-14)
    assert not torch.equal(found, plain)


@pytest.mark.parametrize("importance", ["token", "sequence"])
@pytest.mark.parametrize("shape", shapes.SHAPES)
def test_a_token_of_weight_0_costs_nothing_however_large_its_ratio(shape, importance):
    """A ratio of e^300 overflows float32, and 0 times it is nan. The second row has no weight at all, the
    first has one token without."""
    if importance == "sequence" and "importance" not in shapes.reads(shape):
        pytest.skip(f"{shape} has no other importance")
    policy = torch.tensor([[-1.0, -2.0, -0.5], [-1.5, -0.3, -2.5]], requires_grad=True)
    far = torch.tensor([[0.1, 0.2, -0.3], [300.0, 900.0, 20.0]])
    if importance == "token":
        far[0, 1] = 300.0
    weights = torch.tensor([[1.0, 0.0, 0.7], [0.0, 0.0, 0.0]])
    mask = torch.ones_like(weights, dtype=torch.bool)

    def loss_and_gradient(far):
        given = TokenScores(policy, policy.detach() - far, policy - policy.detach() + far, mask, weights)
        numbers = {"epsilon": 0.2, "epsilon_high": 1e9, "dual_clip": 1e30}
        advantages = torch.tensor([-1.0, -2.0])
        total = grpo(given, advantages, beta=0.0, importance=importance, shape=shape, **numbers).total
        return total, torch.autograd.grad(total, policy)[0]

    near = torch.where(weights == 0, 0.25, far) if importance == "token" else far.clone()
    near[1] = 0.25
    for found, wanted in zip(loss_and_gradient(far), loss_and_gradient(near), strict=True):
        assert torch.equal(found, wanted)


def test_metrics_say_how_much_is_left():
    scores, micro, rows = case(2)
    corrected = correction("masked", "correction.low=0.4", "correction.high=2.5")

    def means(metrics):
        return {name: (m.sum / m.count).item() for name, m in metrics.items()}

    found = with_sample_size(means(corrected.metrics(corrected.with_weights(scores, micro), micro)))
    weights = np.concatenate(by_hand("masked", 0.4, 2.5, 0, rows))
    size = weights.sum() ** 2 / (len(weights) * (weights**2).sum())
    wanted = {"correction_masked": (weights == 0).mean(), "correction_weight": weights.mean()}
    wanted |= {"effective_sample_size": size, "correction_unknown": 5 / 12}
    assert {name: found[name] for name in wanted} == pytest.approx(wanted)
    mu, policy = np.concatenate(rows[2]), np.concatenate(rows[0])
    gap = (policy - mu)[~np.isnan(mu)]
    measured = means(Behavior.of(micro, scores.mask).metrics(scores))
    assert measured["engine_gap"] == pytest.approx(gap.mean())
    assert measured["behavior_kl"] == pytest.approx((np.exp(gap) - 1 - gap).mean())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("loss=dpo correction=truncated", "weighs tokens, and of loss=dpo nothing"),
        ("loss=sft data=adder-sft correction=masked", "and of loss=sft nothing can be weighed"),
        ("loss=grpo online=true correction=masked", "divides by log-probabilities at temp"),
        ("loss=grpo online=true correction=negative_masked", "masks tokens by log-probabilities at temp"),
        ("loss=grpo correction=masked correction.low=6", "high=5.0: must be above correction.low=6"),
    ],
)
def test_what_means_nothing_is_refused(words, said):
    with pytest.raises(ConfigError) as caught:
        make_config(*words.split())
    assert said in str(caught.value)


@pytest.mark.parametrize("pack", [False, True])
def test_they_travel_with_their_row(pack):
    """A row that got an end token behind what was sampled does not know that token's."""
    row = Sequence(np.arange(2, dtype=np.int32), np.arange(3, dtype=np.int32), np.float32([-1, -2, math.nan]))
    other = Sequence(np.arange(3, dtype=np.int32), np.arange(4, dtype=np.int32))
    found = collate([row, other], torch.device("cpu"), pack).behavior_logprobs
    assert found is not None and found.shape == (2, 4)
    assert found[0, :2].tolist() == [-1, -2] and found[0, 2:].isnan().all() and found[1].isnan().all()
    assert collate([other], torch.device("cpu"), pack).behavior_logprobs is None
    assert row.key == Sequence(row.prompt_ids, row.completion_ids).key
