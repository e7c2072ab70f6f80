"""SLiC-HF loss (Zhao et al., 2023, arXiv 2305.10425), which needs no reference model."""

from __future__ import annotations

from trainers.losses.base import LossResult, TokenScores, paired_result, token_sum


def slic(chosen: TokenScores, rejected: TokenScores, *, beta: float, lambda_coef: float) -> LossResult:
    """Return ``max(0, beta - log p(y_w) + log p(y_l)) - lambda log p(y_w)``, summed over the pairs; log p is
    a sum over tokens.

    ``beta``: the target margin, in nats (delta in the paper). ``lambda_coef``: the weight of the second term,
    which keeps the chosen completions likely.
    """
    log_w, log_l = token_sum(chosen.policy, chosen.mask), token_sum(rejected.policy, rejected.mask)
    losses = (beta - log_w + log_l).clamp(min=0) - lambda_coef * log_w
    return paired_result(losses, log_w, log_l, chosen.valid & rejected.valid)
