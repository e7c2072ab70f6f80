"""DPO loss (Rafailov et al., 2023, arXiv 2305.18290), equation 6 of the paper, and its variants that differ
by one setting.

| variant | setting |
|---|---|
| length-normalized DPO (Lambert et al. 2024, Tulu 3, arXiv 2411.15124) | ``length_normalized`` |
| RPO (Pang et al. 2024, arXiv 2404.19733) | ``nll_weight`` |
| f-DPO (Wang et al. 2023, arXiv 2309.16240) | ``divergence`` |
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, softplus

from trainers.losses.base import LossResult, TokenScores, paired_result, token_mean

LARGEST = 60.0
"""Upper bound on the exponents in ``implied_reward``, in nats, so that the float32 gradient does not
overflow"""


def dpo(
    chosen: TokenScores,
    rejected: TokenScores,
    *,
    beta: float,
    length_normalized: bool = False,
    nll_weight: float = 0.0,
    divergence: Literal["reverse_kl", "forward_kl", "js", "alpha"] = "reverse_kl",
    divergence_alpha: float = 0.5,
) -> LossResult:
    """Return ``-log sigmoid(beta h(s_w) - beta h(s_l)) - nll_weight m_w``, summed over the pairs. h is
    ``implied_reward``, by default h(s) = s; m_w is the mean token log-probability of the chosen completion.

    ``chosen`` and ``rejected``: the same n pairs, row by row. ``beta``: reward per nat of log-ratio; a
    smaller value lets the policy move further from the reference. ``length_normalized``: s is the mean of the
    log-ratio over tokens instead of its sum. ``nll_weight``: weight of m_w. ``divergence``,
    ``divergence_alpha``: see ``implied_reward``.
    """
    sequence = mean_log_ratio if length_normalized else TokenScores.sequence_log_ratio
    reward_w = beta * implied_reward(sequence(chosen), divergence, divergence_alpha)
    reward_l = beta * implied_reward(sequence(rejected), divergence, divergence_alpha)
    losses = -logsigmoid(reward_w - reward_l)
    if nll_weight:
        losses = losses - nll_weight * token_mean(chosen.policy, chosen.mask)
    return paired_result(losses, reward_w, reward_l, chosen.valid & rejected.valid)


def mean_log_ratio(scores: TokenScores) -> Tensor:
    """Return [R], the mean of the (clipped) log-ratio over completion tokens, in nats."""
    return token_mean(scores.log_ratio, scores.mask)


def implied_reward(s: Tensor, divergence: str, alpha: float) -> Tensor:
    """Return [R] f'(u) - f'(1) at u = exp(s), where f is the divergence that keeps the policy near the
    reference (f-DPO, Table 1).

    ``reverse_kl``: s, as in DPO. ``forward_kl``: 1 - 1/u. ``js``: log(2 u / (1 + u)). ``alpha``, in (0, 1):
    (1 - u^-alpha) / alpha, which tends to ``reverse_kl`` as alpha tends to 0 and to ``forward_kl`` as it
    tends to 1. Raises ValueError for any other divergence or alpha.
    """
    if divergence == "reverse_kl":
        return s
    if divergence == "forward_kl":
        return -torch.expm1((-s).clamp(max=LARGEST))
    if divergence == "js":
        return s - softplus(s) + math.log(2)
    if divergence == "alpha" and 0 < alpha < 1:
        return -torch.expm1((-alpha * s).clamp(max=LARGEST)) / alpha
    raise ValueError(
        f"divergence={divergence}: use reverse_kl, forward_kl, js, or alpha with divergence_alpha={alpha} in "
        "(0, 1)"
    )
