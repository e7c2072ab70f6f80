"""What goes into a loss and what comes out of it. A loss is a pure function of these and of numbers from its
yaml."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor


class Mean(NamedTuple):
    """A mean kept as its two halves: adding those up over microbatches and ranks gives the exact mean of the
    global batch."""

    sum: Tensor
    count: Tensor  # type: ignore[assignment]  # also a method of tuple, which nobody calls here


@dataclass(frozen=True)
class TokenScores:
    """Token log-probabilities of R rows at T completion positions, in nats, float32.

    A row whose mask is False throughout fills a batch up: losses give it neither a value nor a gradient nor a
    count.
    """

    policy: Tensor
    """[R, T] log pi_theta(y_t | x, y_<t); carries the gradient; 0 where the mask is False"""
    reference: Tensor
    """[R, T] log pi_ref(y_t | x, y_<t); no gradient"""
    log_ratio: Tensor
    """[R, T] policy - reference, clipped when humanline is on: ready for the loss"""
    mask: Tensor
    """[R, T] bool, the only source of "does this token count" """
    weights: Tensor | None = None
    """[R, T] what a token's term of the loss is multiplied by (``trainers.corrections``), without gradient;
    None: 1"""
    collision: Tensor | None = None
    """[R, T] log sum_v p_v^2 of what each token is drawn from, nats, without gradient; None: not asked for"""

    @property
    def valid(self) -> Tensor:
        """[R] bool: the rows that are real."""
        return self.mask.any(dim=-1)

    def sequence_log_ratio(self) -> Tensor:
        """[R] s = sum over completion tokens of the (clipped) log-ratio, nats."""
        return token_sum(self.log_ratio, self.mask)

    def split(self, n: int) -> tuple[TokenScores, TokenScores]:
        """The first n rows and the rest (chosen and rejected of n pairs)."""
        fields = (self.policy, self.reference, self.log_ratio, self.mask)
        return TokenScores(*(f[:n] for f in fields)), TokenScores(*(f[n:] for f in fields))


@dataclass(frozen=True)
class LossResult:
    """The loss of one microbatch: a SUM over its units; the step divides by the count of the global batch."""

    total: Tensor
    """[] float32, carries the gradient"""
    metrics: dict[str, Mean] = field(default_factory=dict)
    """name -> (sum, count), both [] and without gradient"""
    examples: Tensor | None = None
    """[n] the loss of each example, 0 of those that fill a batch up: they add up to ``total``. None where the
    loss is no sum over examples"""


def token_sum(values: Tensor, mask: Tensor) -> Tensor:
    """[R] the sum of [R, T] ``values`` over the tokens that count. What lies elsewhere, inf and nan included,
    has no effect and gets no gradient; a row without a token gives 0."""
    return torch.where(mask, values, 0.0).sum(dim=-1)


def token_mean(values: Tensor, mask: Tensor) -> Tensor:
    """[R] the mean of [R, T] ``values`` over the tokens that count (the mask's, never those that differ from
    0); 0 without one."""
    return token_sum(values, mask) / mask.sum(dim=-1).clamp(min=1)


def kl_estimate(scores: TokenScores) -> Tensor:
    """[R, T] ``e^d - d - 1`` with ``d = log pi_0 - log pi_theta``, nats, 0 where the mask is False."""
    d = torch.where(
        scores.mask, scores.reference - scores.policy, 0.0
    )  # before the exponential: inf * 0 is nan in its gradient
    return torch.expm1(d) - d


def agreement(margin: Tensor) -> Tensor:
    """1 where the margin is positive, 0 where it is negative, 1/2 where it is 0: an accuracy that a policy
    equal to its reference leaves at one half."""
    return (torch.sign(margin.detach()) + 1) / 2


def paired_result(losses: Tensor, chosen: Tensor, rejected: Tensor, valid: Tensor) -> LossResult:
    """The LossResult of n pairs: ``losses`` [n] summed over the ``valid`` ones, and the rewards [n] that the
    loss compared."""
    metrics = {
        "reward_chosen": mean_where(chosen, valid),
        "reward_rejected": mean_where(rejected, valid),
        "reward_accuracy": mean_where(agreement(chosen - rejected), valid),
    }
    examples = torch.where(valid, losses, 0.0)
    return LossResult(examples.sum(), metrics, examples)


def mean_where(values: Tensor, where: Tensor) -> Mean:
    """The mean of ``values`` where ``where`` is True, as a Mean. Both of the same shape; what lies elsewhere
    does not matter."""
    return Mean(torch.where(where, values, 0.0).sum().detach(), where.sum())
