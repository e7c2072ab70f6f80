"""Humanline: the clip and its gradient, exactness when off, the fractions logged; in its place random
rejection: its rates, its limit (Theorem 4.3), and draws of nothing but seed, step, row and position."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from common.errors import ConfigError
from config.schema import BetaConfig
from trainers.humanline import (
    Humanline,
    RejectionKey,
    detach_rejected,
    log_thresholds,
    rejected,
    rule_of,
)
from trainers.losses.base import TokenScores
from trainers.losses.dpo import dpo
from trainers.losses.grpo import grpo

PAPER = Humanline(-1.5, 1.5)


def scored(log_ratios, humanline, mask=None):
    policy = torch.tensor([log_ratios], requires_grad=True)
    mask = torch.ones(1, len(log_ratios), dtype=torch.bool) if mask is None else torch.tensor([mask])
    return policy, humanline.scores(policy, torch.zeros_like(policy.detach()), mask)


def test_clipping_clamps_in_log_space_and_stops_the_gradient_outside():
    policy, scores = scored([-80.0, -1.6, -1.4, 0.0, 1.4, 1.6, 80.0], PAPER)
    assert scores.log_ratio.tolist() == [[-1.5, -1.5, pytest.approx(-1.4), 0.0, pytest.approx(1.4), 1.5, 1.5]]
    gradient = torch.autograd.grad(scores.log_ratio.sum(), policy)[0]
    assert gradient.tolist() == [[0.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0]]
    assert scores.policy is policy and not scores.reference.any(), "the raw log-probabilities stay"
    assert scored([-3.0, 3.0], Humanline(-0.5, 2.0))[1].log_ratio.tolist() == [[-0.5, 2.0]]


@given(
    st.lists(st.tuples(st.floats(-1e4, 0, width=32), st.floats(-1e4, 0, width=32)), min_size=1, max_size=20)
)
def test_off_is_the_plain_difference_bit_for_bit(values):
    policy, reference = (torch.tensor([[v[i] for v in values]]) for i in (0, 1))
    policy.requires_grad_()
    scores = Humanline().scores(policy, reference, torch.ones(1, len(values), dtype=torch.bool))
    assert torch.equal(scores.log_ratio, policy - reference)
    assert torch.equal(torch.autograd.grad(scores.log_ratio.sum(), policy)[0], torch.ones_like(policy))
    found = Humanline().metrics(scores)
    assert float(found["clipped_low"].sum) == float(found["clipped_high"].sum) == 0.0


def test_the_fractions_are_over_the_mask_and_of_the_raw_log_ratios():
    """What lies on a bound is not beyond it."""
    values = [-2.0, 2.0, 2.5, 1.5, -1.5, 0.0, -99.0, math.nan]
    _, scores = scored(values, PAPER, mask=[True] * 6 + [False] * 2)
    found = {name: (float(x.sum), int(x.count)) for name, x in PAPER.metrics(scores).items()}
    assert found == {"kl": (2.5, 6), "clipped_low": (1.0, 6), "clipped_high": (2.0, 6)}


# -- random rejection ------------------------------------------------------------------------------


def beta(*numbers: float) -> BetaConfig:
    """M_P, M_R, gamma_P, beta_P, gamma_R and beta_R."""
    return BetaConfig(**dict(zip(BetaConfig.__annotations__, numbers, strict=True)))


CONSTANTS = beta(3.0, 2.5, 0.7, 1.3, 1.0, 4.0)
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


def log_ratios():
    return torch.linspace(-4, 4, 400).reshape(4, 100).double()


def test_the_limit_accepts_what_clipping_leaves_alone():
    """Its derivative is clipping's, and its values are unclamped."""
    leaf = log_ratios().requires_grad_()
    reject = rejected(leaf, log_thresholds(LIMIT, 0, 0, list("abcd"), 100))
    assert torch.equal(~reject, (leaf >= -1.5) & (leaf <= 1.5))
    sampled, clipped = detach_rejected(leaf, reject), PAPER.clip(leaf)
    gradients = [torch.autograd.grad(values.sum(), leaf)[0] for values in (sampled, clipped)]
    assert torch.equal(*gradients) and torch.equal(sampled, leaf) and not torch.equal(sampled, clipped)


def test_in_the_limit_grpos_gradients_are_clippings_and_dpos_are_not():
    leaf = log_ratios().requires_grad_()
    mask = torch.ones_like(leaf, dtype=torch.bool)
    reject = rejected(leaf, log_thresholds(LIMIT, 0, 0, list("abcd"), 100))
    gradients = []
    for made in (detach_rejected(leaf, reject), PAPER.clip(leaf)):
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


def test_rejected_tokens_keep_their_value_and_lose_their_gradient():
    sampling = Humanline(sampling=beta(10.0, 10.0, 2.0, 20.0, 2.0, 20.0), seed=3)
    policy = (2 * torch.randn(8, 50, generator=torch.Generator().manual_seed(0))).requires_grad_()
    mask, key = torch.ones_like(policy, dtype=torch.bool), RejectionKey(5, [f"row {r}" for r in range(8)])
    scores = sampling.scores(policy, torch.zeros_like(policy), mask, key)
    (gradient,) = torch.autograd.grad(scores.log_ratio.sum(), policy)
    assert torch.equal(scores.log_ratio, policy) and set(gradient.unique().tolist()) == {0.0, 1.0}
    found = sampling.metrics(scores, key)
    assert set(found) == {"kl", "rejected"}
    assert float(found["rejected"].sum) == int((gradient == 0).sum()) and int(found["rejected"].count) == 400


def shrunk(log_ratio: torch.Tensor, *, by: float) -> torch.Tensor:
    return log_ratio / by


def test_a_rule_of_ones_own_takes_the_place_of_clipping():
    named = {"_target_": f"{__name__}.shrunk"}
    own = Humanline(rule=rule_of(named | {"by": 4}))
    policy, scores = scored([-8.0, 0.0, 2.0], own)
    assert scores.log_ratio.tolist() == [[-2.0, 0.0, 0.5]]
    assert torch.autograd.grad(scores.log_ratio.sum(), policy)[0].tolist() == [[0.25] * 3]
    told = own.metrics(scores)
    assert set(told) == {"kl", "changed"} and (told["changed"].sum, told["changed"].count) == (2, 3)
    for wrong in (named, named | {"by": 4, "width": 1}, {"_target_": "math.fsum"}):
        with pytest.raises(ConfigError, match="humanline_rule"):
            rule_of(wrong)
