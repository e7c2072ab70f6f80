"""Humanline (paper §5.1): clip every token log-ratio upstream of the loss, and let the reference follow the policy one step behind.

This is the only place that clips and the only place that says when to sync. With humanline off the bounds are infinite and nothing is
ever due: the same code, exact, without a branch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from trainers.losses.base import Ratio, TokenScores, ratio


@dataclass(frozen=True)
class Humanline:
    """``log_epsilon_P`` and ``log_epsilon_R`` in nats; ``sync_freq`` (k) in steps, None for never."""

    log_epsilon_P: float = -math.inf
    log_epsilon_R: float = math.inf
    sync_freq: int | None = None

    def clip(self, log_ratio: Tensor) -> Tensor:
        """Clamp [R, T] log-ratios (nats) to [log eps_P, log eps_R]; the gradient is 0 outside (paper §5.1, listing C.2)."""
        return log_ratio.clamp(self.log_epsilon_P, self.log_epsilon_R)

    def due(self, step: int) -> bool:
        """Whether the reference becomes the policy at the end of ``step``, after backward and before the optimizer step (C.2.1)."""
        return self.sync_freq is not None and step % self.sync_freq == 0

    def last_step_before_sync(self, step: int) -> float:
        """The last step that still sees the reference of ``step``: the next one, from ``step`` on, at whose end a sync is due."""
        return math.inf if self.sync_freq is None else math.ceil(step / self.sync_freq) * self.sync_freq

    def scores(self, policy: Tensor, reference: Tensor, mask: Tensor) -> TokenScores:
        """TokenScores of policy and reference log-probabilities, [R, T] each: the one place where log-ratios are made."""
        return TokenScores(policy, reference, self.clip(policy - reference), mask)

    def metrics(self, scores: TokenScores) -> dict[str, Ratio]:
        """``kl``: the mean unclipped token log-ratio; ``clipped_low`` / ``clipped_high``: the share of tokens beyond each bound."""
        raw = (scores.policy - scores.reference).detach()
        return {
            "kl": ratio(raw, scores.mask),
            "clipped_low": ratio((raw < self.log_epsilon_P).float(), scores.mask),
            "clipped_high": ratio((raw > self.log_epsilon_R).float(), scores.mask),
        }


OFF = Humanline()
