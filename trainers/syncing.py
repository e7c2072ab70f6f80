"""Rules for when the reference becomes the policy, by humanline's schedule, by others (for comparison), or
never.

| ``sync_mode`` | when | reference that the loss of step t compares the policy with |
|---|---|---|
| ``humanline`` | before the update of every k-th step (paper C.2.1) | the policy of step t - 1 at k = 1: one step behind |
| ``trust_region`` | after the update of every k-th step | at k = 1 the policy itself, so DPO's loss stays at ln 2 |
| ``ema`` | before the update of every k-th step, by ``sync_alpha`` | a running mean of earlier policies |
| ``reset`` | as ``humanline`` | the same; the optimizer's moments and step count start afresh |
| ``kl`` | before the update of a step whose batch has KL(policy || reference) above ``sync_kl``, and of the k-th step since the last sync | the policy of a few steps before |
| ``delayed`` | before the update of every step | the policy of step t - k: k steps behind, always |
| ``never`` | only at the start (of every round, unless ``rounds.reset_reference`` is false) | the initial policy (of the round) |

``trust_region`` is from Gorbatovski et al. 2024, arXiv 2404.09656; ``reset`` is from ProRL (Liu et al. 2025,
arXiv 2505.24864), at fixed steps. ``delayed`` has humanline's lag without its jumps: with k it scores the batch
of step t + k in step t, and with k = 1 it is ``humanline`` with k = 1.

With ``kl`` the lifetime of a reference is not known in advance, and the reference has no weights that could
score later batches. So each sync scores the batches of the next k steps. If the reference moves sooner, new
scores are computed; when the scores run out after k steps, it moves in any case. A ``sync_kl`` that is never
reached therefore gives ``humanline`` with k, and one that every step exceeds gives ``humanline`` with 1. The
KL estimate is k3, e^d - d - 1 with d = log pi_ref - log pi_theta, a mean over the completion tokens of the
global batch (Schulman 2020, "Approximating KL divergence").

A reference that *is* the policy of some step needs no weights of its own (models.reference). Two other kinds
need them: one that only moves towards the policy, by ``sync_alpha`` < 1, and one that outlives a round,
because it is compared with rows that were unknown when it was the policy. ``SoftReference`` is the only place
that holds such weights.
"""  # noqa: E501

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

from torch import Tensor, nn

from common.progress import interruptible
from config.schema import Config
from data.batches import Segment
from data.types import Microbatch
from models.reference import Reference, Scored, SoftReference
from trainers.dealing import Dealer, Progress
from trainers.losses.base import Mean, TokenScores
from trainers.meters import global_mean, mean_log_ratio, reference_kl

ANCHOR = "anchor/"
"""Prefix by which a checkpoint tells the scores of a KL term's anchor from the reference's."""


@dataclass(frozen=True)
class Syncing:
    """Schedule of the reference's syncs.

    ``every``: k, in steps; None for never. ``after_update``: whether a sync comes after the update of its
    step instead of just before it. ``alpha``: how far the reference moves towards the policy, in (0, 1].
    ``resets_optimizer``: whether a sync clears the optimizer's moments and step count. ``bound``: the KL of a
    batch, in nats per token, above which the reference moves; ``every`` steps after the last sync it moves in
    any case. None: syncs depend on steps alone. ``delay``: the number of steps that the reference
    stays behind the policy; None: it moves at syncs alone.
    """

    every: int | None = None
    after_update: bool = False
    alpha: float = 1.0
    resets_optimizer: bool = False
    bound: float | None = None
    delay: int | None = None

    @classmethod
    def from_config(cls, config: Config) -> Syncing:
        if config.syncing == "never" or not config.has_reference:
            return cls()
        mode = config.syncing
        if mode == "delayed":
            return cls(every=1, delay=config.sync_freq)
        bound = config.sync_kl if mode == "kl" else None
        return cls(config.sync_freq, mode == "trust_region", config.sync_alpha, mode == "reset", bound)

    def due(self, step: int, since: int = 0, divergences: Sequence[Mean] = ()) -> bool:
        """Return whether the reference moves at the end of ``step``: at steps 0, k, 2k … before the update,
        or at k - 1, 2k - 1 … after it. The answer is the same on every rank.

        With a bound, ``since`` is the step whose policy the reference is, and ``divergences`` are this rank's
        parts of the batch's KL; the host waits for them.
        """
        if self.every is None:
            return False
        if self.bound is None:
            return (step + self.after_update) % self.every == 0
        return step >= since + self.every or global_mean(divergences) > self.bound

    def last_step_before_sync(self, step: int, since: int = 0) -> float:
        """Return the last step that uses the reference of ``step``: the first step, from ``step`` on, at
        whose end a sync is due. With a bound it is the latest step that can use it; without syncs it is
        infinity. With a delay, ``step`` is the first of a segment."""
        if self.every is None:
            return math.inf
        if self.bound is not None:
            return since + self.every
        if self.delay is not None:
            return step + self.delay - 1
        return math.ceil((step + self.after_update) / self.every) * self.every - self.after_update


class SyncedReference(Reference):
    """The reference of a run, which becomes the policy at a segment's start (Algorithm 1, line 3) and by the
    ``schedule``, and the anchor of its KL term where that is another."""

    segment: Segment
    """The segment that is trained on, from ``start_segment`` on."""

    def __init__(self, config: Config, policy: nn.Module, dealer: Dealer) -> None:
        self.schedule = Syncing.from_config(config)
        super().__init__(config.reference_batch_size is not None and self.schedule.delay is None)
        self.policy, self.dealer = policy, dealer
        self.outlives_rounds = config.keeps_reference
        self.fixed = not config.online and config.syncing == "never"
        """Whether it is always the initial weights, so that it is scored once, before training."""
        self.soft = SoftReference.part_of(policy) if self.schedule.alpha < 1 or self.outlives_rounds else None
        anchored = config.loss.get("kl_anchor") == "initial" and not config.stays_initial
        self.anchor = Reference(self.by_row) if anchored else None
        # Not a part of the policy: a run that resumes loads the initial weights before its checkpoint.
        self.initial = SoftReference(policy) if anchored and config.online else None
        self.initial_logprobs: Mapping[str, Tensor] = {}
        """Row key -> [C] log-probabilities under the initial weights, nats (for ``drift``); rows may be
        missing."""

    def start_segment(self, segment: Segment, at: Progress) -> None:
        """Become the policy at the start of the segment, unless the initial weights are the reference, or a
        run goes on inside the segment. Where ``rounds.reset_reference`` is false, stay as it is from the
        second segment on."""
        self.segment = segment
        if self.fixed or at.position > 0:
            return
        stays = self.outlives_rounds and at.segment > 0
        if self.soft is not None and not stays:
            self.soft.follow(self.policy, alpha=1.0)
        since = self.step if stays else at.step
        self._score(since, interruptible(self.upcoming(segment, 0, at.step, since)))
        if self.initial is not None and self.anchor is not None:
            every = self.dealer.upcoming(segment, 0, at.step, math.inf)
            with self.initial.in_place_of(self.policy):
                self.anchor.refresh(self.policy, 0, interruptible(every))

    def sync(self, at: Progress, policy_step: int) -> None:
        """Move to the current policy, that of ``policy_step`` (or towards it, by ``sync_alpha``), and score
        the batches that will be compared with it."""
        segment = self.segment
        if self.soft is not None:
            self.soft.follow(self.policy, self.schedule.alpha)
        if (delay := self.schedule.delay) is None:
            self._score(policy_step, self.upcoming(segment, at.position + 1, at.step + 1, policy_step))
            return
        ahead = at.position + delay
        batch = [self.dealer.microbatches(segment.batch(ahead))] if ahead < segment.steps else []
        first = at.step - at.position  # the segment's
        self.advance(self.policy, max(first, at.step + 1 - delay), at.step, delay, batch)

    def upcoming(self, segment: Segment, position: int, step: int, since: int | None = None) -> Scored:
        """Return the batches from ``position`` on that use the same reference as step ``step``: up to the
        next sync or the segment's end. ``since``: the step whose policy the reference is; None: ``step``."""
        last = self.schedule.last_step_before_sync(step, step if since is None else since)
        return self.dealer.upcoming(segment, position, step, last)

    def metrics(self, micro: Microbatch, scores: TokenScores) -> dict[str, Mean]:
        """Return ``drift``, the mean token log-ratio of the policy to the initial weights, and where the
        schedule depends on it, ``reference_kl``."""
        drift = {"drift": mean_log_ratio(micro, scores, self.initial_logprobs)}
        return drift if self.schedule.bound is None else drift | {"reference_kl": reference_kl(scores)}

    def _score(self, since: int, upcoming: Scored) -> None:
        with nullcontext() if self.soft is None else self.soft.in_place_of(self.policy):
            self.refresh(self.policy, since, upcoming)

    # -- state of a run --------------------------------------------------------------------------------

    def use_initial(self, scores: Mapping[str, Tensor], rows: Mapping[str, Tensor]) -> None:
        """Store the scores of the training rows under the initial weights, [C] nats, by row (``rows``), and
        where the reference, or the KL term's anchor, stays at these weights, by their own keys."""
        self.initial_logprobs = rows
        if self.fixed:
            self.scores = scores
        elif self.anchor is not None:
            self.anchor.scores = scores

    def state(self) -> dict[str, Tensor]:
        """Return this rank's scores up to the next sync, and in this round those of a KL term's anchor, on
        the CPU; empty where they were computed once before training."""
        if self.fixed:
            return {}
        scores = dict(self.scores)
        if self.initial is not None and self.anchor is not None:
            scores |= {ANCHOR + key: values for key, values in self.anchor.scores.items()}
        return {key: values.cpu().contiguous() for key, values in scores.items()}

    def restore(self, step: int, scores: Mapping[str, Tensor]) -> None:
        """Continue as the reference of ``step`` from where ``state`` was taken."""
        if self.fixed:
            return
        here = {key: values.to(self.dealer.world.device) for key, values in scores.items()}
        self.step, self.scores = step, {k: v for k, v in here.items() if not k.startswith(ANCHOR)}
        if self.initial is not None and self.anchor is not None:
            self.anchor.scores = {k.removeprefix(ANCHOR): v for k, v in here.items() if k.startswith(ANCHOR)}
