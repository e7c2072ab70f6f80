"""Every objective once more, from its paper: float64, row by row, gradients derived by hand. Nothing of the
project is called.

A function takes rows (or chosen and rejected rows) and numbers and returns the sum over the units and its
gradient with respect to every policy log-probability, [R, T]. Rows without a token are no unit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

INF = math.inf


@dataclass
class Rows:
    policy: np.ndarray
    reference: np.ndarray
    mask: np.ndarray
    low: float = -INF
    high: float = INF

    def __post_init__(self):
        raw = self.policy - self.reference
        self.log_ratio = np.clip(raw, self.low, self.high)
        self.passes = (self.low <= raw) & (raw <= self.high) & self.mask
        self.n = self.mask.sum(1)

    def s(self, i):
        return float(self.log_ratio[i][self.mask[i]].sum())

    def log_p(self, i):
        return float(self.policy[i][self.mask[i]].sum())


def softplus(x):
    return float(np.logaddexp(0.0, x))


def sigmoid(x):
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def _pairs(w, loser, one, through_ratio):
    """Sum ``one(i) -> (loss, dloss/d(sum of w's tokens), dloss/d(sum of l's tokens))`` over the real
    pairs."""
    total, grad_w, grad_l = 0.0, np.zeros(w.policy.shape), np.zeros(loser.policy.shape)
    for i in range(len(w.n)):
        if w.n[i] and loser.n[i]:
            loss, dw, dl = one(i)
            total += loss
            grad_w[i] = dw * (w.passes if through_ratio else w.mask)[i]
            grad_l[i] = dl * (loser.passes if through_ratio else loser.mask)[i]
    return total, np.concatenate([grad_w, grad_l])


def dpo(w, loser, beta):
    def one(i):
        m = beta * (w.s(i) - loser.s(i))
        return softplus(-m), -beta * sigmoid(-m), beta * sigmoid(-m)

    return _pairs(w, loser, one, True)


def cdpo(w, loser, beta, epsilon):
    def one(i):
        m = beta * (w.s(i) - loser.s(i))
        slope = beta * (epsilon * sigmoid(m) - (1 - epsilon) * sigmoid(-m))
        return (1 - epsilon) * softplus(-m) + epsilon * softplus(m), slope, -slope

    return _pairs(w, loser, one, True)


def ipo(w, loser, tau):
    def one(i):
        gap = w.s(i) / w.n[i] - loser.s(i) / loser.n[i] - 1 / (2 * tau)
        return gap**2, 2 * gap / w.n[i], -2 * gap / loser.n[i]

    return _pairs(w, loser, one, True)


def slic(w, loser, beta, lambda_coef):
    def one(i):
        hinge = beta - w.log_p(i) + loser.log_p(i)
        active = float(hinge > 0)
        return max(0.0, hinge) - lambda_coef * w.log_p(i), -active - lambda_coef, active

    return _pairs(w, loser, one, False)


def simpo(w, loser, beta, gamma_beta_ratio):
    def one(i):
        m = beta * (w.log_p(i) / w.n[i] - loser.log_p(i) / loser.n[i]) - beta * gamma_beta_ratio
        return softplus(-m), -beta * sigmoid(-m) / w.n[i], beta * sigmoid(-m) / loser.n[i]

    return _pairs(w, loser, one, False)


def orpo(w, loser, lambda_coef):
    def one(i):
        m_w, m_l = w.log_p(i) / w.n[i], loser.log_p(i) / loser.n[i]
        log_odds = [m - math.log1p(-math.exp(m)) for m in (m_w, m_l)]
        slope = lambda_coef * sigmoid(log_odds[1] - log_odds[0])
        loss = -m_w + lambda_coef * softplus(log_odds[1] - log_odds[0])
        # d log_odds / dm = 1 / (1 - e^m)
        return loss, (-1 - slope / -math.expm1(m_w)) / w.n[i], slope / -math.expm1(m_l) / loser.n[i]

    return _pairs(w, loser, one, False)


def kto(rows, desirable, kl, beta, desirable_weight, undesirable_weight):
    total, grad = 0.0, np.zeros(rows.policy.shape)
    for i in range(len(rows.n)):
        if rows.n[i]:
            sign, weight = (1, desirable_weight) if desirable[i] else (-1, undesirable_weight)
            value = sigmoid(sign * beta * (rows.s(i) - kl))
            total += weight * sigmoid(-sign * beta * (rows.s(i) - kl))
            grad[i] = (
                -weight * sign * beta * value * sigmoid(-sign * beta * (rows.s(i) - kl)) * rows.passes[i]
            )
    return total, grad


def _surrogate(log_ratio, A, low, high):
    """min(r A, clip(r) A) as equation 1 has it, and its derivative with respect to log r."""
    r = math.exp(log_ratio)
    plain, clipped = r * A, min(max(r, 1 - low), 1 + high) * A
    return min(plain, clipped), (r * A if plain <= clipped else 0.0)


def grpo(
    rows,
    advantages,
    beta,
    epsilon,
    epsilon_high=None,
    importance="token",
    normalization="token",
    max_tokens=None,
):
    high = epsilon if epsilon_high is None else epsilon_high
    total, grad = 0.0, np.zeros(rows.policy.shape)
    for i in range(len(rows.n)):
        tokens = np.flatnonzero(rows.mask[i])
        share = {"token": 1.0, "sequence": 1.0 / max(len(tokens), 1), "constant": 1.0 / (max_tokens or 1)}[
            normalization
        ]
        for t in tokens:
            d = rows.reference[i, t] - rows.policy[i, t]
            log_ratio = rows.log_ratio[i, t] if importance == "token" else rows.s(i) / len(tokens)
            value, slope = _surrogate(log_ratio, advantages[i], epsilon, high)
            total += share * (-value + beta * (math.exp(d) - d - 1))
            grad[i, t] += share * beta * (1 - math.exp(d))
            reach = [t] if importance == "token" else tokens
            for u in reach:
                grad[i, u] -= share * slope / len(reach) * rows.passes[i, u]
    return total, grad


def ppo(rows, advantages, cliprange, KL_coef):
    """``advantages``: [R, T]"""
    total, grad = 0.0, np.zeros(rows.policy.shape)
    for i, t in zip(*np.nonzero(rows.mask), strict=True):
        value, slope = _surrogate(rows.log_ratio[i, t], advantages[i, t], cliprange, cliprange)
        total += -value + KL_coef * (rows.policy[i, t] - rows.reference[i, t])
        grad[i, t] = -slope * rows.passes[i, t] + KL_coef
    return total, grad


def gae(values, reward, gamma, lam):
    """One row: the double sum of Schulman et al. 2016, and the discounted reward to go."""
    n = len(values)
    delta = [
        (reward if t == n - 1 else 0.0) + gamma * (values[t + 1] if t < n - 1 else 0.0) - values[t]
        for t in range(n)
    ]
    advantages = [sum((gamma * lam) ** k * delta[t + k] for k in range(n - t)) for t in range(n)]
    return advantages, [gamma ** (n - 1 - t) * reward for t in range(n)]


def sft(rows):
    return -float(rows.policy[rows.mask].sum()), -rows.mask.astype(float)
