"""When the reference becomes the policy: humanline's way, others (for comparison), or never.

| ``sync_mode`` | when | what the loss of step t compares the policy with |
|---|---|---|
| ``humanline`` | before the update of every k-th step (paper C.2.1) | the policy of step t - 1 at k = 1: one step behind |
| ``trust_region`` | after the update of every k-th step | at k = 1 the policy itself: DPO's loss is ln 2 for ever |
| ``ema`` | before the update of every k-th step, by ``sync_alpha`` | a running mean of earlier policies |
| ``reset`` | as ``humanline`` | the same; the optimizer's moments and step count start afresh |
| ``kl`` | before the update of a step whose batch has KL(policy || reference) above ``sync_kl``, and of the k-th step since the last sync | the policy of a few steps before |
| ``never`` | at the start alone (of every round, unless ``rounds.reset_reference`` is false) | the initial policy (the round's) |

The trust region's is Gorbatovski et al. 2024, arXiv 2404.09656; ``reset`` is ProRL's (Liu et al. 2025, arXiv
2505.24864), at fixed steps.

With ``kl`` it is not known in advance how long a reference lasts, and it has no weights that could score what
comes later. So scores are made k steps ahead, made again when it moves sooner, and where they end it moves
without having been asked to: at k steps it is ``humanline`` with k, as it is with a ``sync_kl`` that is never
reached; with one that every step exceeds it is ``humanline`` with 1. The estimate is k3, e^d - d - 1 with d =
log pi_ref - log pi_theta, a mean over the completion tokens of the global batch (Schulman 2020, "Approximating
KL divergence").

A reference that *is* the policy of some step needs no weights of its own (models.reference). One that only
moves towards it, by ``sync_alpha`` < 1, does, and so does one that outlives a round, which is compared with
rows that nobody knew when it was the policy: ``SoftReference`` is the one place that holds them.
"""  # noqa: E501

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from config.schema import Config
from trainers.drift import global_mean
from trainers.losses.base import Mean


@dataclass(frozen=True)
class Syncing:
    """``every``: k, in steps, None for never. ``after_update``: at the end of a step, when its update has
    been made, or just before it. ``alpha``: how far the reference moves towards the policy, in (0, 1].
    ``resets_optimizer``: whether the optimizer then forgets its moments. ``bound``: the KL of a batch, nats a
    token, above which the reference moves; it then moves at most ``every`` steps later. None: by steps alone.
    """

    every: int | None = None
    after_update: bool = False
    alpha: float = 1.0
    resets_optimizer: bool = False
    bound: float | None = None

    @classmethod
    def from_config(cls, config: Config) -> Syncing:
        if config.syncing == "never" or not config.has_reference:
            return cls()
        mode = config.syncing
        bound = config.sync_kl if mode == "kl" else None
        return cls(config.sync_freq, mode == "trust_region", config.sync_alpha, mode == "reset", bound)

    def due(self, step: int, since: int = 0, divergences: Sequence[Mean] = ()) -> bool:
        """Whether the reference moves at the end of ``step``: at steps 0, k, 2k … before the update, k - 1,
        2k - 1 … after it; the same on every rank.

        With a bound ``since`` is the step whose policy the reference is, and ``divergences`` are this rank's
        parts of the batch's KL: the host waits for them.
        """
        if self.every is None:
            return False
        if self.bound is None:
            return (step + self.after_update) % self.every == 0
        return step >= since + self.every or global_mean(divergences) > self.bound

    def last_step_before_sync(self, step: int, since: int = 0) -> float:
        """The last step that still sees the reference of ``step``: the next one, from ``step`` on, at whose
        end a sync is due; with a bound, the one that it sees at most."""
        if self.every is None:
            return math.inf
        if self.bound is not None:
            return since + self.every
        return math.ceil((step + self.after_update) / self.every) * self.every - self.after_update
