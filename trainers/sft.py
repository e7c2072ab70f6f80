"""Supervised fine-tuning on the best completion alone, without a reference. The loss is a mean over the
global batch's completion tokens."""

from __future__ import annotations

from data import views
from data.types import Example, Microbatch
from trainers.basic import BasicTrainer
from trainers.losses.base import LossResult, TokenScores


class SFTTrainer(BasicTrainer[None]):
    view = staticmethod(views.demonstrations)

    def loss_denominator(self, batch: list[Example]) -> int:
        return sum(len(row.counted) for example in batch for row in example.rows)

    def compute_loss(self, micro: Microbatch, scores: TokenScores, prepared: None) -> LossResult:
        return self.loss(scores, **self.numbers(micro))
