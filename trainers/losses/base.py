"""Inputs and outputs of the losses, with the sums and means over tokens that they share. A loss is a pure
function of these inputs and of numbers from its yaml."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class Mean(NamedTuple):
    """A mean stored as its sum and its count, so that adding both over microbatches and ranks gives the exact
    mean of the global batch."""

    sum: Tensor
    count: Tensor  # type: ignore[assignment]  # also a method of tuple, which nobody calls here


@dataclass(frozen=True)
class TokenScores:
    """Token log-probabilities of R rows at T completion positions, in nats, float32.

    A row whose mask is False throughout only fills up the batch: losses give it no value, no gradient and no
    count.
    """

    policy: Tensor
    """[R, T] log pi_theta(y_t | x, y_<t), with gradient; 0 where the mask is False"""
    reference: Tensor
    """[R, T] log pi_ref(y_t | x, y_<t), without gradient; log mu with ``ratio_reference=behavior``"""
    log_ratio: Tensor
    """[R, T] policy - reference, clipped when humanline is on; the losses read this ratio"""
    mask: Tensor
    """[R, T] bool: whether a token counts; nothing else decides it"""
    weights: Tensor | None = None
    """[R, T] factor that multiplies each token's term of the loss (``trainers.corrections``), without
    gradient; None: 1"""
    anchor: Tensor | None = None
    """[R, T] log-probabilities, in nats, of the policy pi_0 that a KL term compares with, without gradient;
    None: ``reference``"""
    entropy: Tensor | None = None
    """[R, T] entropy of the distribution that each token is drawn from, in nats, with gradient; None: not
    requested"""

    @property
    def valid(self) -> Tensor:
        """[R] bool: True for rows with a token that counts, False for rows that only fill up the batch."""
        return self.mask.any(dim=-1)

    def sequence_log_ratio(self) -> Tensor:
        """Return [R] s, the sum of the (clipped) log-ratio over completion tokens, in nats."""
        return token_sum(self.log_ratio, self.mask)

    def split(self, n: int) -> tuple[TokenScores, TokenScores]:
        """Return the first n rows and the remaining rows (chosen and rejected of n pairs)."""
        tensors = {name: value for name, value in vars(self).items() if value is not None}
        first = {name: value[:n] for name, value in tensors.items()}
        second = {name: value[n:] for name, value in tensors.items()}
        return replace(self, **first), replace(self, **second)


@dataclass(frozen=True)
class LossResult:
    """The loss of one microbatch, SUMMED over its units; the step divides it by the count of the global
    batch."""

    total: Tensor
    """[] float32, with gradient"""
    metrics: dict[str, Mean] = field(default_factory=dict)
    """Metric name -> (sum, count), both [] and without gradient"""


def token_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Return [R], the sum of ``values`` [R, T] over the tokens where ``mask`` is True. Values elsewhere, inf
    and nan included, have no effect and get no gradient; a row without such a token gives 0."""
    return torch.where(mask, values, 0.0).sum(dim=-1)


def token_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Return [R], the mean of ``values`` [R, T] over the tokens where ``mask`` is True; tokens whose value is
    0 count too. A row without such a token gives 0."""
    return token_sum(values, mask) / mask.sum(dim=-1).clamp(min=1)


def kl_estimate(policy: Tensor, other: Tensor, mask: Tensor, estimator: str = "k3") -> Tensor:
    """Return [R, T], an estimate of KL(policy || other) at each token, in nats; 0 where ``mask`` is False.

    ``policy``, ``other``: [R, T] log-probabilities of the tokens. With ``d = log other - log policy``, k1 is
    ``-d``, k2 is ``d^2 / 2`` and k3 is ``e^d - d - 1`` (Schulman 2020, "Approximating KL divergence"). Raises
    ValueError for any other estimator.
    """
    d = torch.where(
        mask, other - policy, 0.0
    )  # masked before the exponential, whose gradient would be inf * 0 = nan
    if estimator == "k1":
        return -d
    if estimator == "k2":
        return d.square() / 2
    if estimator == "k3":
        return torch.expm1(d) - d
    raise ValueError(f"kl_estimator={estimator}: use k1, k2 or k3")


def kl_term(scores: TokenScores, estimator: str) -> Tensor:
    """Return [R, T], the estimate of KL(policy || pi_0) that a penalty weighs; see ``TokenScores.anchor``."""
    anchor = scores.reference if scores.anchor is None else scores.anchor
    return kl_estimate(scores.policy, anchor, scores.mask, estimator)


def running_sum(values: Tensor) -> Tensor:
    """Return the sums of ``values`` up to each element of the last dimension, itself included.

    They are torch's own. On a GPU the order in which those add floats varies, and with deterministic=true
    torch refuses them: then sums of 1, 2, 4, … elements are added up (Hillis and Steele, 1986)."""
    if not torch.are_deterministic_algorithms_enabled():
        return values.cumsum(-1)
    reach = 1
    while reach < values.shape[-1]:
        values = values + F.pad(values[..., :-reach], (reach, 0))
        reach *= 2
    return values


def less_kl_to_come(advantages: Tensor, kl: Tensor, weight: float) -> Tensor:
    """Return [R, T] ``A_t - weight * sum_{s >= t} kl_s``, the advantages of tokens whose reward is less by
    ``weight * kl`` (REINFORCE++, Hu 2025, arXiv 2501.03262; no discount). The KL has no gradient.

    ``advantages``: [R, 1] or [R, T]. ``kl``: [R, T], 0 where a token does not count.
    """
    return advantages - weight * running_sum(kl.detach().flip(-1)).flip(-1)


def agreement(margin: Tensor) -> Tensor:
    """Return 1 where ``margin`` is positive, 0 where it is negative and 1/2 where it is 0, so that a policy
    equal to its reference has an accuracy of one half."""
    return (torch.sign(margin.detach()) + 1) / 2


def paired_result(losses: Tensor, chosen: Tensor, rejected: Tensor, valid: Tensor) -> LossResult:
    """Return the LossResult of n pairs: ``losses`` [n] summed over the ``valid`` pairs, with metrics of the
    rewards ``chosen`` and ``rejected`` [n] that the loss compared."""
    metrics = {
        "reward_chosen": mean_where(chosen, valid),
        "reward_rejected": mean_where(rejected, valid),
        "reward_accuracy": mean_where(agreement(chosen - rejected), valid),
    }
    return LossResult(torch.where(valid, losses, 0.0).sum(), metrics)


def mean_where(values: Tensor, where: Tensor) -> Mean:
    """Return the mean of ``values`` over the places where ``where`` is True, as a Mean without gradient. Both
    have the same shape; values elsewhere have no effect."""
    return Mean(torch.where(where, values, 0.0).sum().detach(), where.sum())
