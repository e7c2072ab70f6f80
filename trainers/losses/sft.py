"""Supervised fine-tuning: the negative log-likelihood of the completion's tokens."""

from __future__ import annotations

from trainers.losses.base import LossResult, TokenScores, token_sum


def sft(scores: TokenScores) -> LossResult:
    """``-log p(y_t | x, y_<t)``, summed over the completion tokens: one unit is a token.

    Token-conditioned fine-tuning (Korbak et al. 2023, arXiv 2302.08582) is this loss too: what differs is the
    control token that the data put before the completion.
    """
    return LossResult(-token_sum(scores.policy, scores.mask).sum())
