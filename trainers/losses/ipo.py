"""IPO loss (Azar et al., 2023, arXiv 2310.12036, equation 17) on means over tokens, as in HALOs and TRL."""

from __future__ import annotations

from trainers.losses.base import LossResult, TokenScores, paired_result, token_mean


def ipo(chosen: TokenScores, rejected: TokenScores, *, tau: float) -> LossResult:
    """Return ``(h - 1 / (2 tau))^2``, summed over the pairs, where h is the difference of the *mean* token
    log-ratios.

    The means are over the tokens of the mask: dividing by the number of non-zero log-ratios would divide by 0
    when the policy equals the reference. ``tau``: a larger value keeps the policy closer to the reference.
    """
    reward_w, reward_l = (
        token_mean(chosen.log_ratio, chosen.mask),
        token_mean(rejected.log_ratio, rejected.mask),
    )
    losses = (reward_w - reward_l - 1 / (2 * tau)).square()
    return paired_result(losses, reward_w, reward_l, chosen.valid & rejected.valid)
