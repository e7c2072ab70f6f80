"""The clip shapes once more, from their papers: float64, token by token, slopes derived by hand. Nothing of
the project is called.

A shape is a function of (log r, log p, log q, A, numbers) of one token, p the policy's and q the reference's
probability of it. It returns the loss, its slope along log r, its slope along log p where it is taken beside
the ratio, and whether the token is clipped or masked.
"""

from __future__ import annotations

import math

import numpy as np

from tests.golden.formulas import sigmoid


def clip(r, epsilon, epsilon_high):
    return min(max(r, 1 - epsilon), 1 + epsilon_high)


def ppo(log_r, log_p, log_q, A, epsilon, epsilon_high):
    r = math.exp(log_r)
    plain, clipped = -r * A, -clip(r, epsilon, epsilon_high) * A
    return (clipped, 0.0, 0.0, True) if clipped > plain else (plain, -r * A, 0.0, False)


def dual(log_r, log_p, log_q, A, epsilon, epsilon_high, dual_clip):
    loss, slope, direct, clipped = ppo(log_r, log_p, log_q, A, epsilon, epsilon_high)
    return (
        (-dual_clip * A, 0.0, 0.0, True)
        if A < 0 and -dual_clip * A < loss
        else (loss, slope, direct, clipped)
    )


def cispo(log_r, log_p, log_q, A, epsilon, epsilon_high):
    r = math.exp(log_r)
    weight = clip(r, epsilon, epsilon_high)
    return -weight * A * log_p, 0.0, -weight * A, weight != r


def reinforce(log_r, log_p, log_q, A):
    return -A * log_p, 0.0, -A, False


def sapo(log_r, log_p, log_q, A, tau_positive, tau_negative):
    tau = tau_positive if A > 0 else tau_negative
    r = math.exp(log_r)
    gate = sigmoid(tau * (r - 1)) if tau * (r - 1) < 700 else 1.0
    closed = sigmoid(-tau * (r - 1)) if tau * (r - 1) < 700 else 0.0
    return -4 / tau * gate * A, -4 * gate * closed * r * A, 0.0, False


def dppo(log_r, log_p, log_q, A, divergence, divergence_bound):
    p, q = math.exp(log_p), math.exp(log_q)
    if divergence == "tv":
        distance = (abs(p - q) + abs((1 - p) - (1 - q))) / 2
    else:
        distance = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
    if distance > divergence_bound and (p - q) * A > 0:
        return 0.0, 0.0, 0.0, True
    return -math.exp(log_r) * A, -math.exp(log_r) * A, 0.0, False


def shaped(rows, advantages, shape, beta, normalization="token", importance="token", **numbers):
    """(total, gradient [R, T], tokens clipped or masked)"""
    total, grad, flagged = 0.0, np.zeros(rows.policy.shape), 0
    for i in range(len(rows.n)):
        tokens, A = np.flatnonzero(rows.mask[i]), advantages[i]
        share = 1.0 if normalization == "token" else 1.0 / max(len(tokens), 1)
        for t in tokens:
            log_r = rows.log_ratio[i, t] if importance == "token" else rows.s(i) / len(tokens)
            reach = [t] if importance == "token" else tokens
            log_p, log_q = rows.policy[i, t], rows.reference[i, t]
            loss, slope, direct, hit = globals()[shape](log_r, log_p, log_q, A, **numbers)
            grad[i, t] += share * direct
            for u in reach:
                grad[i, u] += share * slope / len(reach) * rows.passes[i, u]
            d = rows.reference[i, t] - rows.policy[i, t]
            total += share * (loss + beta * (math.exp(d) - d - 1))
            grad[i, t] += share * beta * (1 - math.exp(d))
            flagged += bool(hit)
    return total, grad, flagged
