"""SPPO loss (Wu et al., 2024, arXiv 2405.00675, equation 4.6) for pairs whose better completion always
wins."""

from __future__ import annotations

from trainers.losses.base import LossResult, TokenScores, paired_result


def sppo(chosen: TokenScores, rejected: TokenScores, *, eta: float) -> LossResult:
    """Return ``(s_w - eta / 2)^2 + (s_l + eta / 2)^2``, summed over the pairs.

    The loss pulls each completion's log-ratio towards eta (P - 1/2), where P is the probability that the
    completion beats the policy's others: 1 for the chosen, 0 for the rejected. ``eta``: in nats.
    """
    s_w, s_l = chosen.sequence_log_ratio(), rejected.sequence_log_ratio()
    losses = (s_w - eta / 2).square() + (s_l + eta / 2).square()
    return paired_result(losses, s_w, s_l, chosen.valid & rejected.valid)
