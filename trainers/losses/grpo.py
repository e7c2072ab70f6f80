"""GRPO (Shao et al. 2024, arXiv 2402.03300), equation 1 of the paper, and its relatives, which differ from it
by a number.

| relative | what to set |
|---|---|
| DAPO's higher upper bound (Yu et al. 2025, arXiv 2503.14476) | ``epsilon_high=0.28`` |
| equation 1's mean over sequences of the mean over tokens | ``normalization="sequence"`` |
| Dr. GRPO (Liu et al. 2025, arXiv 2503.20783) | ``normalization="constant"``, ``max_tokens``; advantages without the std |
| GSPO (Zheng et al. 2025, arXiv 2507.18071) | ``importance="sequence"``, ``normalization="sequence"``, epsilons of about 3e-4 |
"""  # noqa: E501

from __future__ import annotations

import math

import torch
from torch import Tensor

from trainers.losses.base import LossResult, TokenScores, agreement, mean_where, token_mean


def grpo(
    scores: TokenScores,
    advantages: Tensor,
    *,
    beta: float,
    epsilon: float,
    epsilon_high: float | None = None,
    importance: str = "token",
    normalization: str = "token",
    max_tokens: int | None = None,
) -> LossResult:
    """``-min(r A, clip(r, 1 - eps, 1 + eps) A) + beta (e^d - d - 1)`` per token, ``d = log pi_0 - log
    pi_theta``, summed.

    r is exp(``scores.log_ratio``): with humanline it is clipped already, so twice. The KL term reads the raw
    log-probabilities; its baseline pi_0 is the reference (C.1.4).

    ``advantages``: [R], one for all tokens of a row. ``epsilon``, ``epsilon_high``: r is clipped to [1 -
    epsilon, 1 + epsilon_high]; None: the same on both sides. ``importance``: "token", or "sequence" for one
    ratio a row, exp(mean token log-ratio). ``normalization``: "token": every token weighs 1 and the unit is
    the completion token (DAPO); "sequence": 1 / |y|, and "constant": 1 / ``max_tokens``, where the unit is
    the sequence. Raises ValueError for any other.
    """
    mask = scores.mask
    log_r = importance_log_ratio(scores, importance)
    high = epsilon if epsilon_high is None else epsilon_high
    surrogate, clipped = clipped_surrogate(log_r, advantages.unsqueeze(-1), epsilon, high)
    d = torch.where(
        mask, scores.reference - scores.policy, 0.0
    )  # before the exponential: inf * 0 is nan in its gradient
    kl = torch.expm1(d) - d
    weighted = surrogate if scores.weights is None else scores.weights * surrogate
    losses = -weighted + beta * kl if beta else -weighted
    s = scores.sequence_log_ratio()
    metrics = {
        "reward_chosen": mean_where(s, scores.valid & (advantages > 0)),
        "reward_rejected": mean_where(s, scores.valid & (advantages < 0)),
        "reward_accuracy": mean_where(agreement(s * advantages.sign()), scores.valid & (advantages != 0)),
        "ratio_clipped": mean_where(clipped.to(s.dtype), mask),
        "kl_penalty": mean_where(kl, mask),
    }
    return LossResult(
        torch.where(mask, losses / token_divisor(mask, normalization, max_tokens), 0.0).sum(), metrics
    )


def clipped_surrogate(log_r: Tensor, advantages: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """``min(r A, clip(r, 1 - low, 1 + high) A)`` and where the minimum is the clipped branch, both of
    ``log_r``'s shape.

    For A > 0 the minimum is A min(r, 1 + high), for A < 0 it is A max(r, 1 - low). Written so, the ratio is
    clipped before the exponential is taken: a log-ratio of any size gives an exact 0 gradient where the
    clipped branch wins, not 0 * inf.
    """
    ceiling, floor = math.log1p(high), math.log1p(-low) if low < 1 else -math.inf
    bounded = torch.where(advantages >= 0, log_r.clamp(max=ceiling), log_r.clamp(min=floor))
    clipped = ((advantages > 0) & (log_r > ceiling)) | ((advantages < 0) & (log_r < floor))
    return advantages * torch.exp(bounded), clipped


def importance_log_ratio(scores: TokenScores, importance: str) -> Tensor:
    """[R, T] the log of each token's importance ratio, 0 where the mask is False."""
    if importance == "token":
        return torch.where(scores.mask, scores.log_ratio, 0.0)
    if importance == "sequence":
        return torch.where(scores.mask, token_mean(scores.log_ratio, scores.mask).unsqueeze(-1), 0.0)
    raise ValueError(f"importance={importance}: use token or sequence")


def token_divisor(mask: Tensor, normalization: str, max_tokens: int | None) -> Tensor:
    """[R, 1] what a token of each row is divided by in the sum."""
    lengths = mask.sum(dim=-1, keepdim=True)
    if normalization == "token":
        return torch.ones_like(lengths)
    if normalization == "sequence":
        return lengths.clamp(min=1)
    if normalization == "constant" and max_tokens:
        return torch.full_like(lengths, max_tokens)
    raise ValueError(
        f"normalization={normalization}: use token, sequence, or constant with max_tokens={max_tokens} "
        "above 0"
    )
