"""When the reference becomes the policy: humanline's way, others (for comparison), or never.

| ``sync_mode`` | when | what the loss of step t compares the policy with |
|---|---|---|
| ``humanline`` | before the update of every k-th step (paper C.2.1) | the policy of step t - 1 at k = 1: one step behind |
| ``trust_region`` | after the update of every k-th step | at k = 1 the policy itself: DPO's loss is ln 2 for ever |
| ``ema`` | before the update of every k-th step, by ``sync_alpha`` | a running mean of earlier policies |
| ``reset`` | as ``humanline`` | the same; the optimizer's moments and step count start afresh |
| ``never`` | at the start alone (of every round) | the initial policy (the round's) |

The trust region's is Gorbatovski et al. 2024, arXiv 2404.09656; ``reset`` is ProRL's (Liu et al. 2025, arXiv
2505.24864), at fixed steps.

A reference that *is* the policy of some step needs no weights of its own (models.reference). One that only
moves towards it, by ``sync_alpha`` < 1, does: ``SoftReference`` is the one place that holds them.
"""  # noqa: E501

from __future__ import annotations

import math
from dataclasses import dataclass

from config.schema import Config


@dataclass(frozen=True)
class Syncing:
    """``every``: k, in steps, None for never. ``after_update``: at the end of a step, when its update has
    been made, or just before it. ``alpha``: how far the reference moves towards the policy, in (0, 1].
    ``resets_optimizer``: whether the optimizer then forgets its moments."""

    every: int | None = None
    after_update: bool = False
    alpha: float = 1.0
    resets_optimizer: bool = False

    @classmethod
    def from_config(cls, config: Config) -> Syncing:
        if config.syncing == "never" or not config.has_reference:
            return cls()
        mode = config.syncing
        return cls(config.sync_freq, mode == "trust_region", config.sync_alpha, mode == "reset")

    def due(self, step: int) -> bool:
        """Whether the reference moves at the end of ``step``: at steps 0, k, 2k … before the update, k - 1,
        2k - 1 … after it."""
        return self.every is not None and (step + self.after_update) % self.every == 0

    def last_step_before_sync(self, step: int) -> float:
        """The last step that still sees the reference of ``step``: the next one, from ``step`` on, at whose
        end a sync is due."""
        if self.every is None:
            return math.inf
        return math.ceil((step + self.after_update) / self.every) * self.every - self.after_update
