"""SimPO loss (Meng et al., 2024, arXiv 2405.14734, equation 6), which needs no reference model."""

from __future__ import annotations

from torch.nn.functional import logsigmoid

from trainers.losses.base import LossResult, TokenScores, paired_result, token_mean


def simpo(chosen: TokenScores, rejected: TokenScores, *, beta: float, gamma_beta_ratio: float) -> LossResult:
    """Return ``-log sigmoid(beta (m_w - m_l - gamma / beta))``, summed over the pairs; m is the mean token
    log-probability.

    ``gamma_beta_ratio``: the target margin in nats per token, given as gamma / beta so that its meaning does
    not change with beta.
    """
    mean_w, mean_l = token_mean(chosen.policy, chosen.mask), token_mean(rejected.policy, rejected.mask)
    losses = -logsigmoid(beta * (mean_w - mean_l - gamma_beta_ratio))
    return paired_result(losses, beta * mean_w, beta * mean_l, chosen.valid & rejected.valid)
