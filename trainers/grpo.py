"""GRPO: every completion with its group's advantage; by default the loss is a mean over the global batch's
completion tokens (DAPO, C.1.4)."""

from __future__ import annotations

from data import views
from data.types import Example, Microbatch
from trainers.basic import BasicTrainer
from trainers.losses.base import LossResult, TokenScores


class GRPOTrainer(BasicTrainer[None]):
    view = staticmethod(views.group_advantages)

    def loss_denominator(self, batch: list[Example]) -> int:
        if self.config.loss.get("normalization", "token") != "token":
            return len(batch)  # every sequence counts as one (eq. 1's 1/|y|, Dr. GRPO)
        return sum(len(row.completion_ids) for example in batch for row in example.rows)

    def compute_loss(self, micro: Microbatch, scores: TokenScores, prepared: None) -> LossResult:
        return self.loss(scores, micro.labels)


class CentredGRPOTrainer(GRPOTrainer):
    """Dr. GRPO (Liu et al. 2025, arXiv 2503.20783): a std would weigh prompts whose answers differ little as
    much as any."""

    view = staticmethod(views.centred_advantages)
