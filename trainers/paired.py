"""Trainer for losses on pairs (DPO and its variants), where one example is a chosen and a rejected
completion."""

from __future__ import annotations

from data import views
from data.types import Example, Microbatch
from trainers.basic import BasicTrainer
from trainers.losses.base import LossResult, TokenScores


class PairedPreferenceTrainer(BasicTrainer[None]):
    counts = "pairs"
    rows_per_example = 2
    view = staticmethod(views.pairs)
    single_answers = False

    def loss_denominator(self, batch: list[Example]) -> int:
        return len(batch)

    def compute_loss(self, micro: Microbatch, scores: TokenScores, prepared: None) -> LossResult:
        chosen, rejected = scores.split(len(micro.examples))
        return self.loss(chosen, rejected, **self.numbers(micro))
