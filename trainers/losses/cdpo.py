"""cDPO loss, which is DPO for labels that may be wrong (Mitchell, 2023, ericmitchell.ai/cdpo.pdf)."""

from __future__ import annotations

from torch.nn.functional import logsigmoid

from trainers.losses.base import LossResult, TokenScores, paired_result


def cdpo(chosen: TokenScores, rejected: TokenScores, *, beta: float, epsilon: float) -> LossResult:
    """Return ``-(1 - eps) log sigmoid(m) - eps log sigmoid(-m)`` with ``m = beta s_w - beta s_l``, summed
    over the pairs.

    ``epsilon``: the assumed share of pairs whose label is flipped, in [0, 0.5); 0 gives DPO. The loss has its
    minimum at ``m = log((1 - eps) / eps)``, not at infinity.
    """
    reward_w, reward_l = beta * chosen.sequence_log_ratio(), beta * rejected.sequence_log_ratio()
    margin = reward_w - reward_l
    losses = -(1 - epsilon) * logsigmoid(margin) - epsilon * logsigmoid(-margin)
    return paired_result(losses, reward_w, reward_l, chosen.valid & rejected.valid)
