"""Offline PPO losses, with and without a critic (Schulman et al., 2017, arXiv 1707.06347; offline and in one
step as in Ethayarajh et al., 2024, arXiv 2402.01306)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from trainers.losses.base import LossResult, TokenScores, agreement, kl_term, mean_where
from trainers.losses.grpo import by_token, penalised
from trainers.losses.shapes import clipped_surrogate, importance_log_ratio


def ppo(
    scores: TokenScores,
    advantages: Tensor,
    *,
    cliprange: float,
    KL_coef: float,
    kl_estimator: Literal["k1", "k2", "k3"] = "k1",
    kl_in: Literal["loss", "reward"] = "loss",
) -> LossResult:
    """Return ``-min(r A, clip(r, 1 - c, 1 + c) A) + KL_coef (log pi_theta - log pi_0)``, summed over the
    completion tokens; another ``kl_estimator`` replaces the last term.

    r is exp(``scores.log_ratio``), which humanline has already clipped; the KL term reads the raw
    log-probabilities. ``advantages``: [R], one for all tokens of a row (without a critic: its score relative
    to the group's mean), or [R, T] from ``gae``, without gradient. With ``kl_in="reward"`` there is no last
    term, and A is ``penalised``.
    """
    mask, kl = scores.mask, kl_term(scores, kl_estimator)
    A = torch.where(mask, penalised(by_token(advantages), kl, KL_coef, kl_in), 0.0)
    log_r = importance_log_ratio(scores, "token")
    surrogate, clipped = clipped_surrogate(log_r, A, cliprange, cliprange)
    surrogate = surrogate if scores.weights is None else scores.weights * surrogate
    s, row = scores.sequence_log_ratio(), A.sum(dim=-1)
    metrics = {
        "reward_chosen": mean_where(s, row > 0),
        "reward_rejected": mean_where(s, row < 0),
        "reward_accuracy": mean_where(agreement(s * row.sign()), row != 0),
        "ratio_clipped": mean_where(clipped.to(s.dtype), mask),
    }
    penalty = KL_coef * kl if KL_coef and kl_in == "loss" else torch.zeros_like(kl)
    return LossResult((penalty - surrogate).sum(), metrics)  # both terms are 0 outside the mask


def ppo_with_critic(
    scores: TokenScores,
    values: Tensor,
    advantages: Tensor,
    returns: Tensor,
    *,
    cliprange: float,
    KL_coef: float,
    critic_coef: float,
    kl_estimator: Literal["k1", "k2", "k3"] = "k1",
    kl_in: Literal["loss", "reward"] = "loss",
) -> LossResult:
    """Return ``ppo`` plus ``critic_coef (V - return)^2 / 2``, summed over the completion tokens.

    ``values``: [R, T], the value head's estimate before each completion token, with gradient. ``advantages``,
    ``returns``: [R, T], without gradient, from ``gae`` on the values before the step (the advantages are
    normalised over the global batch). With ``kl_in="reward"`` the penalty is in the rewards of ``gae``.
    """
    in_loss = KL_coef if kl_in == "loss" else 0.0
    result = ppo(scores, advantages, cliprange=cliprange, KL_coef=in_loss, kl_estimator=kl_estimator)
    critic = torch.where(scores.mask, values - returns, 0.0).square() / 2
    return LossResult(
        result.total + critic_coef * critic.sum(),
        result.metrics | {"critic_loss": mean_where(critic, scores.mask)},
    )


def gae(
    values: Tensor, rewards: Tensor, mask: Tensor, *, gamma: float, lam: float, penalty: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return (advantages, returns), [R, T] each, without gradient (Schulman et al. 2016, arXiv 1506.02438,
    equation 16).

    ``values``: [R, T], the value of the state before each completion token. ``rewards``: [R], the reward of
    each completion, paid at its last token. ``mask``: [R, T], True on the first tokens of each row.
    ``penalty``: [R, T], what every token's own reward is less by, 0 outside the mask. A return is the
    discounted sum of the rewards from its token on.
    """
    last = torch.arange(mask.shape[1], device=mask.device) == mask.sum(dim=-1, keepdim=True) - 1
    paid = torch.where(last, rewards.unsqueeze(-1), 0.0)
    paid = paid if penalty is None else paid - penalty.detach()
    estimates = torch.where(mask, values.detach(), 0.0)
    advantages, returns = torch.zeros_like(estimates), torch.zeros_like(estimates)
    next_value, advantage, future = (torch.zeros_like(estimates[:, 0]) for _ in range(3))
    for t in reversed(range(mask.shape[1])):
        delta = paid[:, t] + gamma * next_value - estimates[:, t]
        advantage = delta + gamma * lam * advantage
        future = paid[:, t] + gamma * future
        advantages[:, t], returns[:, t], next_value = advantage, future, estimates[:, t]
    return torch.where(mask, advantages, 0.0), torch.where(mask, returns, 0.0)
