"""The KL term's anchor, estimator and place against float64 formulas written independently, for every loss
that has a KL term: values and gradients, token by token."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.golden.test_losses import T, make, scores
from trainers.losses.grpo import grpo
from trainers.losses.ppo import gae, ppo

A = [1.0, -0.5, 0.25, -2.0, 0.0, 0.75]
BETA = 0.3
ESTIMATES = {  # d = log pi_0 - log p -> (estimate, its slope along log p)
    "k1": lambda d: (-d, 1.0),
    "k2": lambda d: (d * d / 2, -d),
    "k3": lambda d: (math.exp(d) - d - 1, 1 - math.exp(d)),
}


def rows_and_anchor():
    """Rows of 0 to T tokens, and log-probabilities of a third policy."""
    rows = make([*range(T + 1)], "near", "humanline", seed=4)
    anchor = rows.policy + np.random.default_rng(5).integers(-300, 300, rows.policy.shape) / 256
    return rows, anchor


def by_hand(rows, pi_0, estimator, place, epsilon):
    """(sum over tokens of -min(r A, clip(r) A) + beta kl, its gradient). In the reward, A is less beta times
    the sum of this and all later kl of the row."""
    total, grad = 0.0, np.zeros(rows.policy.shape)
    for i in range(len(rows.n)):
        tokens = np.flatnonzero(rows.mask[i])
        kl = {t: ESTIMATES[estimator](pi_0[i, t] - rows.policy[i, t]) for t in tokens}
        for t in tokens:
            a = A[i] - (BETA * sum(kl[u][0] for u in tokens if u >= t) if place == "reward" else 0.0)
            r = math.exp(rows.log_ratio[i, t])
            inside = r * a <= min(max(r, 1 - epsilon), 1 + epsilon) * a
            total -= min(r * a, min(max(r, 1 - epsilon), 1 + epsilon) * a)
            grad[i, t] -= r * a * rows.passes[i, t] * inside
            if place == "loss":
                total += BETA * kl[t][0]
                grad[i, t] += BETA * kl[t][1]
    return total, grad


@pytest.mark.parametrize("place", ["loss", "reward"])
@pytest.mark.parametrize("estimator", ESTIMATES)
@pytest.mark.parametrize("anchored", [False, True])
@pytest.mark.parametrize("loss", ["grpo", "ppo"])
def test_values_and_gradients(loss, anchored, estimator, place):
    rows, anchor = rows_and_anchor()
    leaf, made = scores(rows, torch.float64)
    if anchored:
        made = replace(made, anchor=torch.tensor(anchor))
    numbers = {"kl_estimator": estimator, "kl_in": place}
    numbers |= {"beta": BETA, "epsilon": 0.2} if loss == "grpo" else {"KL_coef": BETA, "cliprange": 0.2}
    result = {"grpo": grpo, "ppo": ppo}[loss](made, torch.tensor(A, dtype=torch.float64), **numbers)
    value, gradient = by_hand(rows, anchor if anchored else rows.reference, estimator, place, 0.2)
    (found,) = torch.autograd.grad(result.total, leaf)
    np.testing.assert_allclose(float(result.total.detach()), value, rtol=1e-12)
    np.testing.assert_allclose(found.numpy(), gradient, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", ["ppo", "dual", "cispo", "reinforce", "sapo", "dppo"])
def test_in_every_shape_the_reward_is_another_advantage(shape):
    rows, anchor = rows_and_anchor()
    leaf, made = scores(rows, torch.float64)
    made = replace(made, anchor=torch.tensor(anchor))
    kl = np.where(rows.mask, rows.policy - anchor, 0.0)
    less = torch.tensor(np.array(A)[:, None] - BETA * kl[:, ::-1].cumsum(1)[:, ::-1].copy())
    one = grpo(
        made, torch.tensor(A), beta=BETA, epsilon=0.2, shape=shape, kl_estimator="k1", kl_in="reward"
    ).total
    other = grpo(made, less, beta=0.0, epsilon=0.2, shape=shape).total
    (a,), (b,) = (torch.autograd.grad(total, leaf, retain_graph=True) for total in (one, other))
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_on_policy_k1_in_the_last_tokens_reward_has_the_gradient_of_k2_in_the_loss():
    """At r = 1, of a completion's last token, which has no later one (arXiv 2510.01555)."""
    rows, anchor = rows_and_anchor()
    leaf, made = scores(replace(rows, reference=rows.policy, low=-math.inf, high=math.inf), torch.float64)
    made = replace(made, anchor=torch.tensor(anchor))
    advantages = torch.tensor(A, dtype=torch.float64)
    both = [
        grpo(made, advantages, beta=BETA, epsilon=0.2, kl_estimator=estimator, kl_in=place).total
        for estimator, place in (("k1", "reward"), ("k2", "loss"))
    ]
    (a,), (b,) = (torch.autograd.grad(total, leaf, retain_graph=True) for total in both)
    for i, n in enumerate(rows.n):
        if n:
            assert float(a[i, n - 1]) == pytest.approx(float(b[i, n - 1]), rel=1e-12)


def test_with_a_critic_each_tokens_reward_is_less():
    """The double sum of Schulman et al. 2016, with rewards at every token."""
    rng = np.random.default_rng(6)
    values, kl, reward, gamma, lam = rng.normal(size=4), rng.normal(size=4), 1.0, 0.9, 0.8
    paid = [-BETA * kl[t] + (reward if t == 3 else 0.0) for t in range(4)]
    delta = [paid[t] + gamma * (values[t + 1] if t < 3 else 0.0) - values[t] for t in range(4)]
    wanted = [sum((gamma * lam) ** k * delta[t + k] for k in range(4 - t)) for t in range(4)]
    returns = [sum(gamma**k * paid[t + k] for k in range(4 - t)) for t in range(4)]
    found = gae(
        torch.tensor(values)[None],
        torch.tensor([reward], dtype=torch.float64),
        torch.ones(1, 4, dtype=torch.bool),
        gamma=gamma,
        lam=lam,
        penalty=BETA * torch.tensor(kl)[None],
    )
    np.testing.assert_allclose(torch.cat(found).numpy(), [wanted, returns], rtol=1e-12)
