"""Humanline sampling: its rates, its limit (Theorem 4.3), and draws that depend on nothing but seed, step,
row and position."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats

from config.schema import BetaConfig
from trainers.humanline import Humanline, detach_rejected, log_thresholds, rejected
from trainers.losses.base import TokenScores
from trainers.losses.dpo import dpo
from trainers.losses.grpo import grpo


def beta(*numbers: float) -> BetaConfig:
    """M_P, M_R, gamma_P, beta_P, gamma_R and beta_R."""
    return BetaConfig(**dict(zip(BetaConfig.__annotations__, numbers, strict=True)))


CONSTANTS = beta(3.0, 2.5, 0.7, 1.3, 1.0, 4.0)
BOUNDS = Humanline(-1.5, 1.5)
K, MEAN = 1e12, math.exp(-1.5) / 20.0
LIMIT = beta(20.0, 20.0, K * MEAN, K * (1 - MEAN), K * MEAN, K * (1 - MEAN))
"""Theorem 4.3's construction near its limit: M_P B_P tends to epsilon_P = e^-1.5 and M_R B_R to 1 / epsilon_R
as K grows, here with M_P = M_R = 20 and epsilon_R = e^1.5."""


@pytest.mark.parametrize(
    "constants",
    [
        CONSTANTS,
        beta(3.0, 2.5, 0.05, 1.0, 0.5, 0.5),
        beta(3.0, 2.5, 200.0, 50.0, 30.0, 300.0),
        beta(3.0, 3.0, 0.7, 1.3, 0.7, 1.3),  # alike, and still drawn apart
    ],
)
def test_rejection_rates_are_those_of_the_two_beta_distributions(constants):
    n = 60_000
    thresholds = log_thresholds(constants, 0, 0, [str(i) for i in range(6)], n // 6)
    for ratio in (0.2, 0.5, 1.0, 2.0, 2.9):
        found = rejected(torch.full((6, n // 6), math.log(ratio)), thresholds).double().mean().item()
        accept = stats.beta.cdf(ratio / constants.M_P, constants.gamma_P, constants.beta_P)
        accept *= stats.beta.cdf(1 / (ratio * constants.M_R), constants.gamma_R, constants.beta_R)
        assert found == pytest.approx(1 - accept, abs=5 * math.sqrt(accept * (1 - accept) / n) + 1e-12)


def log_ratios(n=400):
    return torch.linspace(-4, 4, n).reshape(4, n // 4).double()


def test_the_limit_accepts_what_clipping_leaves_alone():
    """Its derivative is clipping's, and its values are unclamped."""
    leaf = log_ratios().requires_grad_()
    reject = rejected(leaf, log_thresholds(LIMIT, 0, 0, list("abcd"), 100))
    assert torch.equal(~reject, (leaf >= -1.5) & (leaf <= 1.5))
    sampled, clipped = detach_rejected(leaf, reject), BOUNDS.clip(leaf)
    gradients = [torch.autograd.grad(values.sum(), leaf)[0] for values in (sampled, clipped)]
    assert torch.equal(*gradients) and torch.equal(sampled, leaf) and not torch.equal(sampled, clipped)


def test_in_the_limit_grpos_gradients_are_clippings_and_dpos_are_not():
    leaf = log_ratios().requires_grad_()
    mask = torch.ones_like(leaf, dtype=torch.bool)
    reject = rejected(leaf, log_thresholds(LIMIT, 0, 0, list("abcd"), 100))
    gradients = []
    for made in (detach_rejected(leaf, reject), BOUNDS.clip(leaf)):
        scores = TokenScores(leaf.detach(), torch.zeros_like(leaf), made, mask)
        totals = (
            grpo(scores, torch.tensor([1.0, -1.0, 0.5, -0.5]).double(), beta=0.0, epsilon=0.15).total,
            dpo(*scores.split(2), beta=0.001).total,
        )
        gradients.append([torch.autograd.grad(total, leaf, retain_graph=True)[0] for total in totals])
    (grpo_sampled, dpo_sampled), (grpo_clipped, dpo_clipped) = gradients
    assert grpo_sampled.any()
    assert torch.equal(grpo_sampled, grpo_clipped)
    assert torch.equal(dpo_sampled != 0, dpo_clipped != 0)
    assert not torch.allclose(dpo_sampled, dpo_clipped, rtol=1e-3)


def test_a_draw_depends_on_seed_step_row_and_position_alone():
    keys = ["a", "b", "c", "d"]
    whole = log_thresholds(CONSTANTS, 1, 7, keys, 12)
    for rank in range(2):  # two ranks with other shares and other padding
        part = log_thresholds(CONSTANTS, 1, 7, keys[rank::2], 9 + rank)
        assert torch.equal(part, whole[:, rank::2, : 9 + rank])
    for other in (log_thresholds(CONSTANTS, 2, 7, keys, 12), log_thresholds(CONSTANTS, 1, 8, keys, 12)):
        assert not torch.eq(other, whole).any()
    assert len(np.unique(whole.numpy())) == whole.numel(), "two tokens share a draw"


def test_padding_that_is_no_number_is_left_alone():
    leaf = torch.tensor([[0.0, math.nan, math.inf]], requires_grad=True)
    kept = detach_rejected(leaf, rejected(leaf, log_thresholds(CONSTANTS, 0, 0, ["a"], 3)))
    shown = torch.where(torch.tensor([[True, False, False]]), kept, 0.0)
    assert torch.isfinite(torch.autograd.grad(shown.sum(), leaf)[0]).all()
