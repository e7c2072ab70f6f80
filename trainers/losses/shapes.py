"""Shapes of the policy-gradient loss, which differ in how they treat a token whose ratio is far from 1.

A shape is a pure function of (scores, advantages, its numbers). It returns the loss of each token, [R, T],
and, by metric name, the tokens that it clipped or masked, [R, T] bool. ``advantages`` broadcast against [R,
T]; values outside the mask have no meaning. ``SHAPES`` maps each name of ``loss.shape`` to its function; a
shape's keyword arguments are the settings that it reads.

r is exp(``scores.log_ratio``), which is already clipped where humanline is on. The losses are minimised, A is
the advantage, and where all r are 1 every shape has the gradient of ``reinforce``.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from trainers.losses.base import TokenScores, token_mean

Shaped = tuple[Tensor, dict[str, Tensor]]
"""[R, T] losses, and metric name -> [R, T] bool, the tokens whose share is logged under that name"""
SATURATED = 50.0
"""Log-ratio in nats at which a sigmoid of the ratio is flat to the last bit and its exponential is still
finite."""


def ppo(
    scores: TokenScores, advantages: Tensor, *, importance: str, epsilon: float, epsilon_high: float | None
) -> Shaped:
    """Return ``-min(r A, clip(r, 1 - epsilon, 1 + epsilon_high) A)`` (Schulman et al. 2017, arXiv 1707.06347;
    equation 1 of the paper). With infinite epsilons it is ``-r A``, the importance-weighted policy
    gradient."""
    log_r = importance_log_ratio(scores, importance)
    surrogate, clipped = clipped_surrogate(log_r, advantages, epsilon, upper(epsilon, epsilon_high))
    return -surrogate, {"ratio_clipped": clipped}


def dual(
    scores: TokenScores,
    advantages: Tensor,
    *,
    importance: str,
    epsilon: float,
    epsilon_high: float | None,
    dual_clip: float,
) -> Shaped:
    """Return ``ppo``, capped at ``-c A`` where A < 0, with c = ``dual_clip`` (dual-clip PPO, Ye et al. 2020,
    arXiv 1912.09729). With infinite c it is ``ppo``. Raises ValueError unless c > 1."""
    _check("dual_clip", dual_clip, dual_clip > 1, "must be above 1")
    log_r = importance_log_ratio(scores, importance)
    ceiling = math.log(dual_clip)
    capped = torch.where(advantages < 0, log_r.clamp(max=ceiling), log_r)
    surrogate, clipped = clipped_surrogate(capped, advantages, epsilon, upper(epsilon, epsilon_high))
    beyond = (advantages < 0) & (log_r > ceiling)
    return -surrogate, {"ratio_clipped": clipped, "dual_clipped": beyond}


def cispo(
    scores: TokenScores, advantages: Tensor, *, importance: str, epsilon: float, epsilon_high: float | None
) -> Shaped:
    """Return ``-sg(clip(r, 1 - epsilon, 1 + epsilon_high)) A log pi_theta``, where sg stops the gradient
    (MiniMax-M1, 2025, arXiv 2506.13585, section 3.1): a clipped token keeps its gradient, with a bounded
    weight.

    The gradient flows through ``scores.policy``, so a token that humanline clips keeps it too. With epsilons
    of 0 it is ``reinforce``; with infinite epsilons it has the gradient of ``ppo`` without clipping.
    """
    low, high = log_range(epsilon, upper(epsilon, epsilon_high))
    log_r = importance_log_ratio(scores, importance)
    weight = torch.exp(log_r.clamp(low, high)).detach()
    return -weight * advantages * _log_policy(scores), {"ratio_clipped": (log_r < low) | (log_r > high)}


def reinforce(scores: TokenScores, advantages: Tensor) -> Shaped:
    """Return ``-A log pi_theta`` (Williams 1992). It has no ratio, so nothing is clipped, not even by
    humanline."""
    return -advantages * _log_policy(scores), {}


def sapo(
    scores: TokenScores, advantages: Tensor, *, importance: str, tau_positive: float, tau_negative: float
) -> Shaped:
    """Return ``-(4 / tau) sigmoid(tau (r - 1)) A``, tau = ``tau_positive`` where A > 0, else ``tau_negative``
    (SAPO, Gao et al. 2025, arXiv 2511.20347). Nothing is cut off: as r moves away from 1, the weight of a
    token falls as 4 sigmoid (1 - sigmoid). As tau tends to 0, it has the gradient of ``ppo`` without
    clipping. Raises ValueError unless both are above 0."""
    _check("tau_positive", tau_positive, tau_positive > 0, "must be above 0")
    _check("tau_negative", tau_negative, tau_negative > 0, "must be above 0")
    r = torch.exp(importance_log_ratio(scores, importance).clamp(max=SATURATED))
    # sigmoid(x) is computed as 1 - sigmoid(-x): a small sigmoid has an exact slope, near 1 it is rounded off
    positive = (1 - torch.sigmoid(tau_positive * (1 - r))) * (4 / tau_positive)
    negative = (1 - torch.sigmoid(tau_negative * (1 - r))) * (4 / tau_negative)
    return -torch.where(advantages > 0, positive, negative) * advantages, {}


def dppo(scores: TokenScores, advantages: Tensor, *, divergence: str, divergence_bound: float) -> Shaped:
    """Return ``-M r A``, where M is 0 or 1 (DPPO, Qi et al. 2026, arXiv 2602.04879, with its binary
    divergences). M is 0 where r has left 1 in the direction that A drives it (A > 0 and r > 1, or A < 0 and r
    < 1) and the divergence of the policy from the reference at this token is above ``divergence_bound``.

    ``divergence`` compares two distributions over "this token or another", where the token has probability q
    under the reference and p under the policy: "tv" is ``|q - p|``, "kl" is ``q log(q / p) + (1 - q) log((1 -
    q) / (1 - p))``, in nats. It uses the raw probabilities, with humanline too. With an infinite bound it is
    ``ppo`` without clipping. Raises ValueError for any other divergence.
    """
    log_p, log_q = scores.policy.detach(), scores.reference
    far = binary_divergence(log_p, log_q, divergence) > divergence_bound
    log_r = log_p - log_q
    masked = far & (((advantages > 0) & (log_r > 0)) | ((advantages < 0) & (log_r < 0)))
    # The ratio of a masked token is not computed, so its size has no effect.
    r = torch.exp(torch.where(masked, 0.0, importance_log_ratio(scores, "token")))
    return torch.where(masked, 0.0, -advantages * r), {"tokens_masked": masked}


SHAPES: dict[str, Callable[..., Shaped]] = {
    shape.__name__: shape for shape in (ppo, dual, cispo, reinforce, sapo, dppo)
}


@cache
def reads(shape: str) -> frozenset[str]:
    """Return the settings that this shape reads. Raises ValueError for an unknown shape."""
    _check("shape", shape, shape in tuple(SHAPES), f"use one of {', '.join(SHAPES)}")
    parameters = inspect.signature(SHAPES[shape]).parameters.values()
    return frozenset(p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY)


def binary_divergence(log_p: Tensor, log_q: Tensor, divergence: str) -> Tensor:
    """Return the divergence between two distributions over "this token or another", elementwise; q is the
    first distribution (see ``dppo``). Raises ValueError for an unknown ``divergence``."""
    p, q = torch.exp(log_p), torch.exp(log_q)
    if divergence == "tv":
        return (q - p).abs()
    if divergence == "kl":
        other_p, other_q = -torch.expm1(log_p), -torch.expm1(log_q)
        return q * (log_q - log_p) + torch.xlogy(other_q, other_q) - torch.xlogy(other_q, other_p)
    raise ValueError(f"divergence={divergence}: use tv or kl")


def clipped_surrogate(log_r: Tensor, advantages: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Return ``min(r A, clip(r, 1 - low, 1 + high) A)`` and, as bool, where the minimum is the clipped
    branch, both of ``log_r``'s shape.

    For A > 0 the minimum is A min(r, 1 + high), for A < 0 it is A max(r, 1 - low). The ratio is clipped
    before the exponential is taken, so a log-ratio of any size gives an exact gradient of 0 where the clipped
    branch wins, not 0 * inf.
    """
    floor, ceiling = log_range(low, high)
    bounded = torch.where(advantages >= 0, log_r.clamp(max=ceiling), log_r.clamp(min=floor))
    clipped = ((advantages > 0) & (log_r > ceiling)) | ((advantages < 0) & (log_r < floor))
    return advantages * torch.exp(bounded), clipped


def log_range(low: float, high: float) -> tuple[float, float]:
    """Return log(1 - low) and log(1 + high); the first is -inf for a low of 1 or more."""
    return math.log1p(-low) if low < 1 else -math.inf, math.log1p(high)


def upper(epsilon: float, epsilon_high: float | None) -> float:
    """Return the epsilon of the upper side; None means that of the lower side."""
    return epsilon if epsilon_high is None else epsilon_high


def importance_log_ratio(scores: TokenScores, importance: str) -> Tensor:
    """Return [R, T], the log of each token's importance ratio, 0 where the mask is False. Where a correction
    gives a token a weight of 0, its exponential is finite: 0 times a ratio that overflows would be nan, in
    the loss and in its gradient. Raises ValueError for an unknown ``importance``."""
    if importance == "token":
        log_r = scores.log_ratio
    elif importance == "sequence":
        log_r = token_mean(scores.log_ratio, scores.mask).unsqueeze(-1)
    else:
        raise ValueError(f"importance={importance}: use token or sequence")
    log_r = torch.where(scores.mask, log_r, 0.0)
    if scores.weights is None:
        return log_r
    return torch.where(scores.weights == 0, log_r.clamp(max=SATURATED), log_r)


def _log_policy(scores: TokenScores) -> Tensor:
    return torch.where(scores.mask, scores.policy, 0.0)


def _check(name: str, value: object, sound: bool, remedy: str) -> None:
    if not sound:
        raise ValueError(f"{name}={value}: {remedy}")
