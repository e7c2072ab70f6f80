"""KTO loss (Ethayarajh et al., 2024, arXiv 2402.01306), equation 7 of the paper."""

from __future__ import annotations

import torch
from torch import Tensor

from trainers.losses.base import LossResult, TokenScores, agreement, mean_where


def kto(
    scores: TokenScores,
    desirable: Tensor,
    kl: Tensor,
    *,
    beta: float,
    desirable_weight: float,
    undesirable_weight: float,
) -> LossResult:
    """Return ``lambda_D (1 - sigmoid(beta (s - z0)))`` for desirable rows and ``lambda_U (1 - sigmoid(beta
    (z0 - s)))`` for the others, summed.

    ``desirable``: [R] bool; it may be all True or all False. ``kl``: [] z0 >= 0, in nats, one for the whole
    global batch, without gradient (it sets where the loss saturates, and nothing is learned through it).
    ``desirable_weight``, ``undesirable_weight``: lambda_D, lambda_U.
    """
    s = scores.sequence_log_ratio()
    gain = torch.where(desirable, s - kl, kl - s)  # nats on the desired side of the reference point
    missing = torch.sigmoid(-beta * gain)  # equals 1 - sigmoid(x), but does not round to 0 as early
    losses = torch.where(desirable, desirable_weight * missing, undesirable_weight * missing)
    metrics = {
        "reward_chosen": mean_where(beta * s, scores.valid & desirable),
        "reward_rejected": mean_where(beta * s, scores.valid & ~desirable),
        "reward_accuracy": mean_where(agreement(gain), scores.valid),
    }
    return LossResult(torch.where(scores.valid, losses, 0.0).sum(), metrics)
