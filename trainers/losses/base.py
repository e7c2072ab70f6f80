"""What goes into a loss and what comes out of it. A loss is a pure function of these and of numbers from its yaml."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor


class Ratio(NamedTuple):
    """A mean kept as its two halves, so that adding them up over microbatches and ranks gives the exact mean of the global batch."""

    sum: Tensor
    count: Tensor


@dataclass(frozen=True)
class TokenScores:
    """Token log-probabilities of R rows at T completion positions, in nats, float32.

    A row whose mask is False throughout fills a batch up: losses give it neither a value nor a gradient nor a count.
    """

    policy: Tensor
    """[R, T] log pi_theta(y_t | x, y_<t); carries the gradient; 0 where the mask is False"""
    reference: Tensor
    """[R, T] log pi_ref(y_t | x, y_<t); no gradient"""
    log_ratio: Tensor
    """[R, T] policy - reference, clipped when humanline is on: ready for the loss"""
    mask: Tensor
    """[R, T] bool, the only source of "does this token count" """

    @property
    def valid(self) -> Tensor:
        """[R] bool: the rows that are real."""
        return self.mask.any(dim=-1)

    def sequence_log_ratio(self) -> Tensor:
        """[R] s = sum over completion tokens of the (clipped) log-ratio, nats."""
        return torch.where(self.mask, self.log_ratio, 0.0).sum(dim=-1)

    def split(self, n: int) -> tuple[TokenScores, TokenScores]:
        """The first n rows and the rest (chosen and rejected of n pairs)."""
        fields = (self.policy, self.reference, self.log_ratio, self.mask)
        return TokenScores(*(f[:n] for f in fields)), TokenScores(*(f[n:] for f in fields))


@dataclass(frozen=True)
class LossResult:
    """The loss of one microbatch: a SUM over its units; the step divides by the count of the global batch."""

    total: Tensor
    """[] float32, carries the gradient"""
    metrics: dict[str, Ratio] = field(default_factory=dict)
    """name -> (sum, count), both [] and without gradient"""


def ratio(values: Tensor, where: Tensor) -> Ratio:
    """The mean of ``values`` where ``where`` is True, as a Ratio. Both of the same shape; non-finite values elsewhere do not matter."""
    return Ratio(torch.where(where, values, 0.0).sum().detach(), where.sum())
