"""GRPO loss (Shao et al., 2024, arXiv 2402.03300), equation 1 of the paper, and its variants that differ by a
setting or by ``shape`` (``trainers.losses.shapes``).

| variant | setting |
|---|---|
| DAPO's higher upper bound (Yu et al. 2025, arXiv 2503.14476) | ``epsilon_high=0.28`` |
| equation 1's mean over sequences of the mean over tokens | ``normalization="sequence"`` |
| Dr. GRPO (Liu et al. 2025, arXiv 2503.20783) | ``normalization="constant"``, ``max_tokens``; advantages without the std |
| GSPO (Zheng et al. 2025, arXiv 2507.18071) | ``importance="sequence"``, ``normalization="sequence"``, epsilons of about 3e-4 |
| CISPO, SAPO, DPPO, dual clip, REINFORCE | ``shape`` and its numbers |
"""  # noqa: E501

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from trainers.losses.base import (
    LossResult,
    Mean,
    TokenScores,
    agreement,
    kl_term,
    less_kl_to_come,
    mean_where,
    token_sum,
)
from trainers.losses.shapes import SHAPES, reads


def grpo(
    scores: TokenScores,
    advantages: Tensor,
    *,
    beta: float,
    epsilon: float,
    epsilon_high: float | None = None,
    importance: Literal["token", "sequence"] = "token",
    normalization: Literal["token", "sequence", "constant"] = "token",
    max_tokens: int | None = None,
    shape: Literal["ppo", "dual", "cispo", "reinforce", "sapo", "dppo"] = "ppo",
    dual_clip: float = 3.0,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
    divergence: Literal["tv", "kl"] = "tv",
    divergence_bound: float = 0.15,
    kl_estimator: Literal["k1", "k2", "k3"] = "k3",
    kl_in: Literal["loss", "reward"] = "loss",
    entropy_bonus: float = 0.0,
) -> LossResult:
    """Return the sum over tokens of ``-min(r A, clip(r, 1 - eps, 1 + eps) A) + beta (e^d - d - 1)`` with ``d
    = log pi_0 - log pi_theta``; another ``shape`` replaces the first term, another ``kl_estimator`` the last.

    r is exp(``scores.log_ratio``); with humanline it is already clipped, so it is clipped twice. The KL term
    reads the raw log-probabilities; its baseline pi_0 is the reference (C.1.4), or ``scores.anchor``. With
    ``kl_in="reward"`` there is no last term, and A is ``penalised``. ``entropy_bonus`` times the entropy of a
    token's distribution is subtracted, where the scores have it.

    ``advantages``: [R], one for all tokens of a row, or [R, T], one per token. ``epsilon``, ``epsilon_high``:
    r is clipped to [1 - epsilon, 1 + epsilon_high]; None: ``epsilon`` on both sides.
    ``importance``: "token", or "sequence" for one ratio per row, exp(mean token log-ratio).
    ``normalization``: with "token" every token has weight 1 and the unit is the completion token (DAPO); with
    "sequence" (1 / |y|) and "constant" (1 / ``max_tokens``) the unit is the sequence. Each of the other
    numbers belongs to one shape. Raises ValueError for any other value.
    """
    mask = scores.mask
    ranges = {"importance": importance, "epsilon": epsilon, "epsilon_high": epsilon_high}
    bounds = {"divergence": divergence, "divergence_bound": divergence_bound, "dual_clip": dual_clip}
    taus = {"tau_positive": tau_positive, "tau_negative": tau_negative}
    numbers = ranges | bounds | taus
    read = {name: numbers[name] for name in reads(shape)}
    kl = kl_term(scores, kl_estimator)
    A = penalised(by_token(advantages), kl, beta, kl_in)
    losses, shares = SHAPES[shape](scores, A, **read)
    if scores.weights is not None:
        losses = scores.weights * losses
    losses = losses + beta * kl if beta and kl_in == "loss" else losses
    if entropy_bonus and scores.entropy is not None:
        losses = losses - entropy_bonus * scores.entropy
        shares = shares | {"entropy": scores.entropy.detach()}
    losses = torch.where(mask, losses / token_divisor(mask, normalization, max_tokens), 0.0)
    return LossResult(losses.sum(), _metrics(scores, advantages, shares, kl))


def _metrics(
    scores: TokenScores, advantages: Tensor, shares: dict[str, Tensor], kl: Tensor
) -> dict[str, Mean]:
    s, mask = scores.sequence_log_ratio(), scores.mask
    row = advantages if advantages.dim() == 1 else token_sum(advantages, mask)
    return {
        "reward_chosen": mean_where(s, scores.valid & (row > 0)),
        "reward_rejected": mean_where(s, scores.valid & (row < 0)),
        "reward_accuracy": mean_where(agreement(s * row.sign()), scores.valid & (row != 0)),
        **{name: mean_where(where.to(s.dtype), mask) for name, where in shares.items()},
        "kl_penalty": mean_where(kl, mask),
    }


def by_token(advantages: Tensor) -> Tensor:
    """Return advantages as the shapes take them: [R, 1] from [R], or [R, T] unchanged."""
    return advantages if advantages.dim() == 2 else advantages.unsqueeze(-1)


def penalised(advantages: Tensor, kl: Tensor, beta: float, kl_in: str) -> Tensor:
    """Return the advantages, [R, 1] or [R, T], less the KL to come where ``kl_in`` is "reward". Raises
    ValueError unless it is that or "loss"."""
    if kl_in not in ("loss", "reward"):
        raise ValueError(f"kl_in={kl_in}: use loss or reward")
    return less_kl_to_come(advantages, kl, beta) if beta and kl_in == "reward" else advantages


def token_divisor(mask: Tensor, normalization: str, max_tokens: int | None) -> Tensor:
    """Return [R, 1], the number by which each row's token losses are divided. Raises ValueError for an
    unknown ``normalization``."""
    lengths = mask.sum(dim=-1, keepdim=True)
    if normalization == "token":
        return torch.ones_like(lengths)
    if normalization == "sequence":
        return lengths.clamp(min=1)
    if normalization == "constant" and max_tokens:
        return torch.full_like(lengths, max_tokens)
    raise ValueError(
        f"normalization={normalization}: use token, sequence, or constant with max_tokens={max_tokens} "
        "above 0"
    )
