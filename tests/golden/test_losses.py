"""The losses against float64 formulas written independently: values and gradients, in float32 and float64."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from tests.golden import formulas
from tests.golden.formulas import INF, Rows
from trainers.humanline import Humanline
from trainers.losses.bradley_terry import bradley_terry
from trainers.losses.cdpo import cdpo
from trainers.losses.dpo import dpo
from trainers.losses.grpo import grpo
from trainers.losses.ipo import ipo
from trainers.losses.kto import kto
from trainers.losses.orpo import orpo
from trainers.losses.ppo import gae, ppo, ppo_with_critic
from trainers.losses.sft import sft
from trainers.losses.simpo import simpo
from trainers.losses.slic import slic

T = 5
PAIRS = list(itertools.product(range(T + 1), repeat=2))  # every pair of lengths, empty ones included
SCENARIOS = {"equal": 0.0, "near": 0.75, "beyond the range": 3.0, "far": 30.0, "further": 80.0}
RANGES = {"plain": (-INF, INF), "humanline": (-1.5, 1.5), "asymmetric": (-0.5, 2.0)}
DTYPES = {torch.float32: 1e-6, torch.float64: 1e-12}

every_case = [
    pytest.mark.parametrize("scenario", SCENARIOS),
    pytest.mark.parametrize("clip", RANGES),
    pytest.mark.parametrize("dtype", DTYPES, ids=str),
]


def cases(test):
    for mark in every_case:
        test = mark(test)
    return test


def make(lengths, scenario, clip, seed):
    """Rows on a grid of 1/256 nats, so that float32 holds every log-probability and every difference of two
    exactly."""
    rng = np.random.default_rng(seed)
    shape = (len(lengths), T)
    policy = -rng.integers(8, 900, shape) / 256
    wide = SCENARIOS[scenario]
    ratio = (
        np.round(rng.uniform(-wide, wide, shape) * 256) / 256
        if wide < 30
        else rng.choice([-wide, wide, 0.125], shape)
    )
    mask = np.arange(T) < np.array(lengths)[:, None]
    return Rows(policy, policy - ratio, mask, *RANGES[clip])


def scores(rows, dtype):
    policy = torch.tensor(rows.policy, dtype=dtype, requires_grad=True)
    made = Humanline(rows.low, rows.high).scores(
        policy, torch.tensor(rows.reference, dtype=dtype), torch.tensor(rows.mask)
    )
    return policy, made


def agree(result, leaves, golden, dtype):
    value, gradient = golden
    tolerance = DTYPES[dtype]
    assert result.total.dtype == dtype
    assert result.total.shape == ()
    found = torch.cat(torch.autograd.grad(result.total, leaves)).double().numpy()
    np.testing.assert_allclose(float(result.total.detach()), value, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(found, gradient, rtol=tolerance, atol=tolerance)


PAIRED = [
    (dpo, formulas.dpo, {"beta": 0.1}),
    (dpo, formulas.dpo, {"beta": 1.0}),
    (cdpo, formulas.cdpo, {"beta": 0.1, "epsilon": 0.2}),
    (ipo, formulas.ipo, {"tau": 0.1}),
    (slic, formulas.slic, {"beta": 1.0, "lambda_coef": 0.1}),
    (simpo, formulas.simpo, {"beta": 2.0, "gamma_beta_ratio": 0.5}),
    (orpo, formulas.orpo, {"lambda_coef": 0.25}),
]


@pytest.mark.parametrize(("loss", "formula", "numbers"), PAIRED, ids=lambda x: getattr(x, "__name__", ""))
@cases
def test_paired_losses(loss, formula, numbers, scenario, clip, dtype):
    win, lose = (make([pair[side] for pair in PAIRS], scenario, clip, seed=side) for side in (0, 1))
    (leaf_win, chosen), (leaf_lose, rejected) = scores(win, dtype), scores(lose, dtype)
    agree(loss(chosen, rejected, **numbers), [leaf_win, leaf_lose], formula(win, lose, **numbers), dtype)


LABELS = {
    "mixed": lambda n: np.arange(n) % 3 > 0,
    "all desirable": lambda n: np.ones(n, bool),
    "all undesirable": lambda n: np.zeros(n, bool),
}


@pytest.mark.parametrize("labels", LABELS)
@pytest.mark.parametrize("kl", [0.0, 2.5])
@cases
def test_kto(labels, kl, scenario, clip, dtype):
    rows = make([*range(T + 1)] * 3, scenario, clip, seed=2)
    desirable = LABELS[labels](len(rows.n))
    leaf, made = scores(rows, dtype)
    numbers = {"beta": 0.25, "desirable_weight": 1.1, "undesirable_weight": 1.0}
    agree(
        kto(made, torch.tensor(desirable), torch.tensor(kl, dtype=dtype), **numbers),
        [leaf],
        formulas.kto(rows, desirable, kl, **numbers),
        dtype,
    )


def standardised(rewards):
    rewards = np.asarray(rewards, float)
    return (rewards - rewards.mean()) / rewards.std() if rewards.std() else np.zeros(len(rewards))


GROUPS = {
    "of two": np.tile([1.0, -1.0], 12),
    "of eight": np.concatenate([standardised([0, 0, 1, 0, 1, 1, 1, 0.5])] * 3),
    "without variance": np.zeros(24),
}
RELATIVES = [
    {"beta": 0.01, "epsilon": 0.15},
    {"beta": 0.0, "epsilon": 0.2, "epsilon_high": 0.28},
    {"beta": 0.01, "epsilon": 0.5, "normalization": "sequence"},
    {"beta": 0.0, "epsilon": 0.2, "normalization": "constant", "max_tokens": 7},
    {
        "beta": 0.01,
        "epsilon": 3e-4,
        "epsilon_high": 4e-4,
        "importance": "sequence",
        "normalization": "sequence",
    },
    {"beta": 0.01, "epsilon": 1.5, "importance": "sequence"},
]


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("numbers", RELATIVES, ids=str)
@cases
def test_grpo_and_its_relatives(group, numbers, scenario, clip, dtype):
    rows = make([*range(T + 1)] * 4, scenario, clip, seed=4)
    leaf, made = scores(rows, dtype)
    advantages = torch.tensor(GROUPS[group], dtype=dtype)
    agree(
        grpo(made, advantages, **numbers),
        [leaf],
        formulas.grpo(rows, advantages.double().numpy(), **numbers),
        dtype,
    )


@pytest.mark.parametrize("group", ["of two", "of eight"])
@cases
def test_ppo(group, scenario, clip, dtype):
    rows = make([*range(T + 1)] * 4, scenario, clip, seed=5)
    leaf, made = scores(rows, dtype)
    advantages = torch.tensor(GROUPS[group], dtype=dtype)
    spread = advantages.double().numpy()[:, None] * np.ones(T)
    agree(
        ppo(made, advantages, cliprange=0.2, KL_coef=0.1), [leaf], formulas.ppo(rows, spread, 0.2, 0.1), dtype
    )


def test_ppo_with_a_critic_adds_half_the_squared_error():
    rows = make([0, 1, 3, 5], "near", "plain", seed=6)
    leaf, made = scores(rows, torch.float64)
    rng = np.random.default_rng(0)
    values, advantages, returns = (rng.normal(size=rows.mask.shape) for _ in range(3))
    V = torch.tensor(values, requires_grad=True)
    result = ppo_with_critic(
        made, V, torch.tensor(advantages), torch.tensor(returns), cliprange=0.2, KL_coef=0.1, critic_coef=0.01
    )
    policy_value, policy_gradient = formulas.ppo(rows, advantages, 0.2, 0.1)
    critic = 0.5 * ((values - returns) ** 2)[rows.mask].sum()
    agree(result, [leaf], (policy_value + 0.01 * critic, policy_gradient), torch.float64)
    by_value = torch.autograd.grad(
        ppo_with_critic(
            made,
            V,
            torch.tensor(advantages),
            torch.tensor(returns),
            cliprange=0.2,
            KL_coef=0.1,
            critic_coef=0.01,
        ).total,
        V,
    )[0]
    np.testing.assert_allclose(by_value.numpy(), 0.01 * (values - returns) * rows.mask, atol=1e-12)


@pytest.mark.parametrize(("gamma", "lam"), [(0.99, 0.95), (1.0, 1.0), (0.9, 0.0)])
def test_gae(gamma, lam):
    rng = np.random.default_rng(1)
    lengths, rewards = [0, 1, 2, 5], np.array([1.0, -1.0, 0.5, 1.0])
    values = rng.normal(size=(4, T))
    mask = np.arange(T) < np.array(lengths)[:, None]
    garbage = np.where(mask, values, np.nan)
    advantages, returns = gae(
        torch.tensor(garbage), torch.tensor(rewards), torch.tensor(mask), gamma=gamma, lam=lam
    )
    for i, n in enumerate(lengths):
        expected = formulas.gae(values[i, :n].tolist(), rewards[i], gamma, lam)
        np.testing.assert_allclose(advantages[i, :n].numpy(), expected[0], atol=1e-12)
        np.testing.assert_allclose(returns[i, :n].numpy(), expected[1], atol=1e-12)
        assert not advantages[i, n:].any()
        assert not returns[i, n:].any()


@cases
def test_sft(scenario, clip, dtype):
    rows = make([*range(T + 1)], scenario, clip, seed=7)
    leaf, made = scores(rows, dtype)
    agree(sft(made), [leaf], formulas.sft(rows), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bradley_terry(dtype):
    chosen, rejected, valid = (
        [1.5, -80.0, 2.0, np.nan, 0.25],
        [0.5, 30.0, 2.0, np.inf, 90.0],
        [True, True, True, False, True],
    )
    a, b = (torch.tensor(x, dtype=dtype, requires_grad=True) for x in (chosen, rejected))
    behind = [lose - win if real else -INF for win, lose, real in zip(chosen, rejected, valid, strict=True)]
    slope = np.array([-formulas.sigmoid(x) if x > -INF else 0.0 for x in behind])
    value = sum(formulas.softplus(x) for x in behind)
    agree(bradley_terry(a, b, torch.tensor(valid)), [a, b], (value, np.concatenate([slope, -slope])), dtype)
