"""DPO (Rafailov et al. 2023, arXiv 2305.18290), equation 6 of the paper."""

from __future__ import annotations

from torch.nn.functional import logsigmoid

from trainers.losses.base import LossResult, TokenScores, paired_result


def dpo(chosen: TokenScores, rejected: TokenScores, *, beta: float) -> LossResult:
    """``-log sigmoid(beta s_w - beta s_l)``, summed over the pairs.

    ``chosen`` and ``rejected``: the same n pairs, row by row. ``beta``: how much a nat of log-ratio is worth;
    a smaller one lets the policy go further from the reference.
    """
    reward_w, reward_l = beta * chosen.sequence_log_ratio(), beta * rejected.sequence_log_ratio()
    return paired_result(-logsigmoid(reward_w - reward_l), reward_w, reward_l, chosen.valid & rejected.valid)
