"""GRPO loss (Shao et al., 2024, arXiv 2402.03300), equation 1 of the paper, and its variants that differ by a
setting or by ``shape`` (``trainers.losses.shapes``).

| variant | setting |
|---|---|
| DAPO's higher upper bound (Yu et al. 2025, arXiv 2503.14476) | ``epsilon_high=0.28`` |
| equation 1's mean over sequences of the mean over tokens | ``normalization="sequence"`` |
| Dr. GRPO (Liu et al. 2025, arXiv 2503.20783) | ``normalization="constant"``, ``max_tokens``; advantages without the std |
| GSPO (Zheng et al. 2025, arXiv 2507.18071) | ``importance="sequence"``, ``normalization="sequence"``, epsilons of about 3e-4 |
| CISPO, SAPO, GMPO, DPPO, M2PO, dual clip, REINFORCE | ``shape`` and its numbers |
"""  # noqa: E501

from __future__ import annotations

import torch
from torch import Tensor

from trainers.losses.base import LossResult, TokenScores, agreement, kl_estimate, mean_where, token_sum
from trainers.losses.shapes import SHAPES, reads


def grpo(
    scores: TokenScores,
    advantages: Tensor,
    masked: Tensor | None = None,
    *,
    beta: float,
    epsilon: float,
    epsilon_high: float | None = None,
    importance: str = "token",
    normalization: str = "token",
    max_tokens: int | None = None,
    shape: str = "ppo",
    dual_clip: float = 3.0,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
    divergence: str = "tv",
    divergence_bound: float = 0.15,
    moment_bound: float = 0.04,
) -> LossResult:
    """Return the sum over tokens of ``-min(r A, clip(r, 1 - eps, 1 + eps) A) + beta (e^d - d - 1)`` with ``d
    = log pi_0 - log pi_theta``; another ``shape`` replaces the first term.

    r is exp(``scores.log_ratio``); with humanline it is already clipped, so it is clipped twice. The KL term
    reads the raw log-probabilities; its baseline pi_0 is the reference (C.1.4).

    ``advantages``: [R], one for all tokens of a row, or [R, T], one per token. ``masked``: [R, T] bool, the
    tokens that ``shape="m2po"`` masks in the global batch; None: these rows are the whole batch. ``epsilon``,
    ``epsilon_high``: r is clipped to [1 - epsilon, 1 + epsilon_high]; None: ``epsilon`` on both sides.
    ``importance``: "token", or "sequence" for one ratio per row, exp(mean token log-ratio).
    ``normalization``: with "token" every token has weight 1 and the unit is the completion token (DAPO); with
    "sequence" (1 / |y|) and "constant" (1 / ``max_tokens``) the unit is the sequence. Each of the other
    numbers belongs to one shape. Raises ValueError for any other value.
    """
    mask = scores.mask
    ranges = {"importance": importance, "epsilon": epsilon, "epsilon_high": epsilon_high}
    bounds = {"divergence": divergence, "divergence_bound": divergence_bound, "moment_bound": moment_bound}
    taus = {"tau_positive": tau_positive, "tau_negative": tau_negative}
    numbers = ranges | bounds | taus | {"dual_clip": dual_clip, "masked": masked}
    read = {name: numbers[name] for name in reads(shape)}
    losses, shares = SHAPES[shape](scores, by_token(advantages), **read)
    if scores.weights is not None:
        losses = scores.weights * losses
    kl = kl_estimate(scores)
    losses = losses + beta * kl if beta else losses
    s = scores.sequence_log_ratio()
    row = advantages if advantages.dim() == 1 else token_sum(advantages, mask)
    metrics = {
        "reward_chosen": mean_where(s, scores.valid & (row > 0)),
        "reward_rejected": mean_where(s, scores.valid & (row < 0)),
        "reward_accuracy": mean_where(agreement(s * row.sign()), scores.valid & (row != 0)),
        **{name: mean_where(where.to(s.dtype), mask) for name, where in shares.items()},
        "kl_penalty": mean_where(kl, mask),
    }
    return LossResult(
        torch.where(mask, losses / token_divisor(mask, normalization, max_tokens), 0.0).sum(), metrics
    )


def by_token(advantages: Tensor) -> Tensor:
    """Return advantages as the shapes take them: [R, 1] from [R], or [R, T] unchanged."""
    return advantages if advantages.dim() == 2 else advantages.unsqueeze(-1)


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
