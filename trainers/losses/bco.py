"""BCO loss (Jung et al., 2024, arXiv 2404.04656), a binary classifier of desirable and undesirable
completions whose logit is the reward."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from trainers.losses.base import LossResult, TokenScores, agreement, mean_where


def bco(
    scores: TokenScores, desirable: Tensor, shift: Tensor, density_ratio: Tensor | None = None, *, beta: float
) -> LossResult:
    """Return ``-log sigmoid(beta s - delta)`` for desirable rows and ``-w log sigmoid(delta - beta s)`` for
    the others, summed over the rows.

    ``desirable``: [R] bool. ``shift``: [] delta, the running mean of the rewards (the average of the
    desirable and the undesirable mean); it is the same on every rank and has no gradient. ``density_ratio``:
    [R] w, the likelihood of the row's prompt in desirable data relative to undesirable data, read for
    undesirable rows only; None where both kinds come from the same prompts.
    """
    reward = beta * scores.sequence_log_ratio()
    gain = torch.where(desirable, reward - shift, shift - reward)
    losses = -logsigmoid(gain)
    if density_ratio is not None:
        losses = losses * torch.where(scores.valid & ~desirable, density_ratio, 1.0)
    metrics = {
        "reward_chosen": mean_where(reward, scores.valid & desirable),
        "reward_rejected": mean_where(reward, scores.valid & ~desirable),
        "reward_accuracy": mean_where(agreement(gain), scores.valid),
    }
    return LossResult(torch.where(scores.valid, losses, 0.0).sum(), metrics)
