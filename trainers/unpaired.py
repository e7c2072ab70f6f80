"""Trainer for losses on single examples (KTO), where an example is a desirable or undesirable sequence,
judged against one KL estimate per global batch."""

from __future__ import annotations

import torch
from torch import Tensor

from common.errors import ConfigError
from config.schema import Config
from data import views
from data.batches import Segment
from data.types import Example, Microbatch
from models.distributed import sum_over_ranks
from trainers.basic import BasicTrainer
from trainers.losses.base import LossResult, TokenScores
from trainers.scorer import TokenScorer


class UnpairedPreferenceTrainer(BasicTrainer[Tensor]):
    view = staticmethod(views.labelled)
    feedback = ("pair", "random", "min", "threshold")
    labelled_examples = True
    mismatched = True

    def loss_denominator(self, batch: list[Example]) -> int:
        return len(batch)

    def arrange(self, batch: list[Example]) -> list[Example]:
        """Return the batch with its mismatched rows, which are made in the batch's own order, before anything
        is sorted or split."""
        return views.mismatched(batch, self.config.model.max_length)

    @classmethod
    def check(cls, config: Config, segment: Segment) -> None:
        """Raise ConfigError for a plan in which a batch has only one prompt: no row could be mismatched
        there, and z0 would have no data."""
        for i in range(segment.steps):
            if len({example.prompt_id for example in segment.batch(i)}) < 2:
                raise ConfigError(
                    "model.batch_size",
                    config.model.batch_size,
                    f"batch {i} has one prompt only, so the batch's KL (eq. 7) has no mismatched row; "
                    "use a larger model.batch_size, or n_examples so that the last batch has two prompts",
                )

    def prepare(self, batch: list[tuple[int, Microbatch]], scorer: TokenScorer) -> list[Tensor]:
        """Return z0 for each microbatch, the same [] tensor (eq. 7), in nats: max(0, mean of s over the
        global batch's mismatched rows).

        These rows are clipped like any other. No gradient flows through z0.
        """
        total = torch.zeros(2, dtype=torch.float64, device=self.world.device)
        for step, micro in batch:
            if micro.mismatched is not None:
                scores = scorer.score_without_gradient(step, micro.mismatched)
                total += torch.stack(
                    [scores.sequence_log_ratio().double().sum(), scores.valid.sum().double()]
                )
        sum_over_ranks(total)
        z0 = (total[0] / total[1].clamp(min=1)).clamp(min=0).float()
        return [z0] * len(batch)

    def compute_loss(self, micro: Microbatch, scores: TokenScores, prepared: Tensor) -> LossResult:
        return self.loss(scores, micro.labels > 0, prepared, **self.numbers(micro))
