"""ORPO (Hong et al. 2024, arXiv 2403.07691, equations 6 and 7), without a reference model."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from trainers.losses.base import LossResult, TokenScores, paired_result, token_mean


def log_odds(mean_log_prob: Tensor) -> Tensor:
    """``log(p / (1 - p))`` of ``p = exp(mean token log-probability)``. A completion that is certain to the
    last bit keeps finite odds (about 16 nats in float32)."""
    below_one = mean_log_prob.clamp(max=-torch.finfo(mean_log_prob.dtype).eps)
    return below_one - torch.log(-torch.expm1(below_one))


def orpo(chosen: TokenScores, rejected: TokenScores, *, lambda_coef: float) -> LossResult:
    """``-m_w - lambda log sigmoid(log odds(y_w) - log odds(y_l))``, summed over the pairs.

    m is the mean token log-probability, and a completion's p is exp(m). ``lambda_coef``: the weight of the
    odds ratio beside plain fine-tuning on the chosen.
    """
    mean_w, mean_l = token_mean(chosen.policy, chosen.mask), token_mean(rejected.policy, rejected.mask)
    odds_w, odds_l = log_odds(mean_w), log_odds(mean_l)
    losses = -mean_w - lambda_coef * logsigmoid(odds_w - odds_l)
    return paired_result(losses, odds_w, odds_l, chosen.valid & rejected.valid)
