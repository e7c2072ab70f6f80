"""What the losses log: rewards as the loss sees them, ties counted one half, everything over the mask
only."""

from __future__ import annotations

import math

import pytest
import torch

from trainers.humanline import Humanline
from trainers.losses.dpo import dpo
from trainers.losses.grpo import grpo
from trainers.losses.ipo import ipo
from trainers.losses.kto import kto
from trainers.losses.orpo import orpo
from trainers.losses.simpo import simpo


def rows(*sums):
    """One row of two tokens per number, which is its sequence log-ratio; None is a row without a token."""
    policy = torch.tensor([[-1.0 if s is None else s - 1.0, -1.0] for s in sums])
    mask = torch.tensor([[s is not None] * 2 for s in sums])
    return Humanline().scores(policy, torch.full_like(policy, -1.0), mask)


def means(result):
    return {name: float(x.sum / x.count) for name, x in result.metrics.items() if x.count}


def test_pairs():
    found = dpo(rows(1.0, 2.0, 0.5, None), rows(0.0, 3.0, 0.5, 7.0), beta=0.1).metrics
    assert {name: int(x.count) for name, x in found.items()} == dict.fromkeys(found, 3)
    assert float(found["reward_chosen"].sum) == pytest.approx(0.35)
    assert float(found["reward_rejected"].sum) == pytest.approx(0.35)
    assert float(found["reward_accuracy"].sum) == 1.5  # won, lost, tied


def judged(scores, desirable, kl, beta):
    """KTO's result."""
    weights = {"desirable_weight": 1.1, "undesirable_weight": 1.0}
    return kto(scores, torch.tensor(desirable), torch.tensor(kl), beta=beta, **weights)


def test_ipo_and_simpo_log_means_over_tokens():
    assert means(ipo(rows(1.0), rows(-1.0), tau=0.1))["reward_chosen"] == pytest.approx(0.5)
    found = means(simpo(rows(0.0), rows(-1.0), beta=2.0, gamma_beta_ratio=0.5))
    assert found == pytest.approx({"reward_chosen": -2.0, "reward_rejected": -3.0, "reward_accuracy": 1.0})


def test_kto_is_judged_against_the_reference_point():
    scores = rows(2.0, 1.0, 0.0, 0.0, 3.0, None)
    assert means(judged(scores, [True, True, True, False, False, True], 1.0, beta=0.5)) == pytest.approx(
        {"reward_chosen": 0.5, "reward_rejected": 0.75, "reward_accuracy": 2.5 / 5}
    )
    for desirable in (True, False):
        found = judged(rows(1.0, 2.0), [desirable] * 2, 0.0, beta=1.0).metrics
        counts = [int(found[f"reward_{kind}"].count) for kind in ("chosen", "rejected")]
        assert counts == [2 * desirable, 2 * (not desirable)], "no mean of a kind that is not there"


def test_grpo():
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0, 0.0, 5.0])
    found = grpo(rows(2.0, 2.0, -2.0, -2.0, 9.0, None), advantages, beta=0.01, epsilon=0.2)
    got = means(found)
    assert got["reward_chosen"] == 0.0
    assert got["reward_rejected"] == 0.0
    assert got["reward_accuracy"] == 0.5  # of the four with an advantage, two have the right sign
    # The first token of each row holds its whole log-ratio; the clipped branch wins for (+2, A > 0) and (-2,
    # A < 0).
    assert float(found.metrics["ratio_clipped"].sum) == 2.0
    assert int(found.metrics["ratio_clipped"].count) == 10
    kl = 2 * (math.exp(-2) + 1) + 2 * (math.exp(2) - 3) + math.exp(-9) + 8
    assert float(found.metrics["kl_penalty"].sum) == pytest.approx(kl)


def test_orpo_of_a_certain_completion_is_finite():
    policy = torch.zeros(1, 2, requires_grad=True)
    certain = Humanline().scores(policy, policy.detach(), torch.ones(1, 2, dtype=torch.bool))
    result = orpo(certain, rows(-1.0), lambda_coef=0.25)
    assert torch.isfinite(result.total)
    assert torch.isfinite(torch.autograd.grad(result.total, policy)[0]).all()
