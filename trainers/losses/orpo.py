"""ORPO loss (Hong et al., 2024, arXiv 2403.07691, equations 6 and 7), which needs no reference model."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from trainers.losses.base import LossResult, TokenScores, paired_result, token_mean


def log_odds(mean_log_prob: Tensor) -> Tensor:
    """Return ``log(p / (1 - p))`` for ``p = exp(mean token log-probability)``. p is kept just below 1, so a
    completion with certainty to the last bit still has finite odds (about 16 nats in float32)."""
    below_one = mean_log_prob.clamp(max=-torch.finfo(mean_log_prob.dtype).eps)
    return below_one - torch.log(-torch.expm1(below_one))


def orpo(chosen: TokenScores, rejected: TokenScores, *, lambda_coef: float) -> LossResult:
    """Return ``-m_w - lambda log sigmoid(log odds(y_w) - log odds(y_l))``, summed over the pairs.

    m is the mean token log-probability, and the probability of a completion is exp(m). ``lambda_coef``: the
    weight of the odds-ratio term relative to plain fine-tuning on the chosen completion.
    """
    mean_w, mean_l = token_mean(chosen.policy, chosen.mask), token_mean(rejected.policy, rejected.mask)
    odds_w, odds_l = log_odds(mean_w), log_odds(mean_l)
    losses = -mean_w - lambda_coef * logsigmoid(odds_w - odds_l)
    return paired_result(losses, odds_w, odds_l, chosen.valid & rejected.valid)
