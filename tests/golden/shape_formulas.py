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


def masked_by_prefix(rows, advantages, divergence, divergence_bound, prefix_bound, weight_floor):
    """[R, T]: the paper's algorithm 1, token by token."""
    gone = np.zeros(rows.mask.shape, bool)
    for i in range(len(rows.n)):
        S = W = 0.0
        tokens = np.flatnonzero(rows.mask[i])
        for k, t in enumerate(tokens):
            log_p, log_q = rows.policy[i, t], rows.reference[i, t]
            p, q = math.exp(log_p), math.exp(log_q)
            distance = abs(p - q)
            if divergence == "kl":
                distance = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
            w = 1 - (1 - weight_floor) / (len(tokens) - 1) * k if len(tokens) > 1 else 1.0
            room = min(divergence_bound, divergence_bound + prefix_bound * W - S)
            gone[i, t] = advantages[i] * (p / q - 1) > 0 and w * distance > room
            S, W = S + w * distance, W + w
    return gone


def masked_by_moment(rows, advantages, bound):
    """[R, T]: the paper's loop. As long as the mean square of the tokens that PPO could clip is above the
    bound, the largest goes, and with it those of its size."""
    left = {
        (i, t): rows.log_ratio[i, t] ** 2
        for i, t in zip(*np.nonzero(rows.mask), strict=True)
        if rows.log_ratio[i, t] * advantages[i] > 0
    }
    gone = np.zeros(rows.mask.shape, bool)
    while left and sum(left.values()) / len(left) > bound:
        largest = max(left.values())
        for place in [place for place, square in left.items() if square == largest]:
            gone[place] = True
            del left[place]
    return gone


def shaped(rows, advantages, shape, beta, normalization="token", importance="token", **numbers):
    """(total, gradient [R, T], tokens clipped or masked)"""
    total, grad, flagged = 0.0, np.zeros(rows.policy.shape), 0
    masks = {"m2po": masked_by_moment, "cppo": masked_by_prefix}
    gone = masks[shape](rows, advantages, *numbers.values()) if shape in masks else None
    for i in range(len(rows.n)):
        tokens, A = np.flatnonzero(rows.mask[i]), advantages[i]
        share = 1.0 if normalization == "token" else 1.0 / max(len(tokens), 1)
        for t in tokens:
            log_r = rows.log_ratio[i, t] if importance == "token" else rows.s(i) / len(tokens)
            reach = [t] if importance == "token" else tokens
            if shape == "gmpo":
                loss, slopes, hit = _geometric(rows, i, tokens, A, t, **numbers)
            elif gone is not None:
                hit = gone[i, t]
                loss = 0.0 if hit else -math.exp(log_r) * A
                slopes = {t: loss}
            else:
                log_p, log_q = rows.policy[i, t], rows.reference[i, t]
                loss, slope, direct, hit = globals()[shape](log_r, log_p, log_q, A, **numbers)
                grad[i, t] += share * direct
                slopes = {u: slope / len(reach) for u in reach}
            for u, slope in slopes.items():
                grad[i, u] += share * slope * rows.passes[i, u]
            d = rows.reference[i, t] - rows.policy[i, t]
            total += share * (loss + beta * (math.exp(d) - d - 1))
            grad[i, t] += share * beta * (1 - math.exp(d))
            flagged += bool(hit)
    return total, grad, flagged


def _geometric(rows, i, tokens, A, t, epsilon, epsilon_high):
    """GMPO's loss of row i, its slopes along each token's log-ratio, and whether token t is clipped."""
    low, high = math.log(1 - epsilon), math.log(1 + epsilon_high)
    clipped = {
        u: (rows.log_ratio[i, u] > high) if A > 0 else (rows.log_ratio[i, u] < low if A < 0 else False)
        for u in tokens
    }
    inside = {u: (high if A > 0 else low) if clipped[u] else rows.log_ratio[i, u] for u in tokens}
    loss = -A * math.prod(math.exp(inside[u] / len(tokens)) for u in tokens)
    return loss, {u: 0.0 if clipped[u] else loss / len(tokens) for u in tokens}, clipped[t]
