"""IPO (Azar et al. 2023, arXiv 2310.12036, equation 17), on means over tokens as in HALOs and TRL."""

from __future__ import annotations

from trainers.losses.base import LossResult, TokenScores, paired_result, token_mean


def ipo(chosen: TokenScores, rejected: TokenScores, *, tau: float) -> LossResult:
    """``(h - 1 / (2 tau))^2`` with h the difference of the *mean* token log-ratios, summed over the pairs.

    The means are over the tokens of the mask; dividing by the number of log-ratios that are not 0 would
    divide by nothing at policy = reference. ``tau``: a larger one keeps the policy closer to the reference.
    """
    reward_w, reward_l = (
        token_mean(chosen.log_ratio, chosen.mask),
        token_mean(rejected.log_ratio, rejected.mask),
    )
    losses = (reward_w - reward_l - 1 / (2 * tau)).square()
    return paired_result(losses, reward_w, reward_l, chosen.valid & rejected.valid)
