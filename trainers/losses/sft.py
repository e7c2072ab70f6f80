"""Supervised fine-tuning loss, the negative log-likelihood of the completion tokens."""

from __future__ import annotations

from trainers.losses.base import LossResult, TokenScores, token_sum


def sft(scores: TokenScores) -> LossResult:
    """Return ``-log p(y_t | x, y_<t)``, summed over the completion tokens; one unit is a token.

    Token-conditioned fine-tuning (Korbak et al. 2023, arXiv 2302.08582) uses this loss too: only the data
    differ, which put a control token before the completion.
    """
    return LossResult(-token_sum(scores.policy, scores.mask).sum())
