"""GRPO trainer, which trains every completion with the advantage within its group. By default the loss is a
mean over the global batch's completion tokens (DAPO, C.1.4)."""

from __future__ import annotations

from functools import partial

from config.schema import Config
from data.types import Example, Microbatch
from data.views import ADVANTAGES, View, centred_advantages, group_advantages, normalised
from trainers.basic import BasicTrainer
from trainers.losses.base import LossResult, TokenScores


class GRPOTrainer(BasicTrainer[None]):
    view: View = staticmethod(group_advantages)
    feedback = ("pair", "random", "min", "group")
    single_answers = False
    beta_scales_rewards = False
    loss_keys = ("advantage", "advantage_epsilon")
    corrections = True

    @classmethod
    def view_of(cls, config: Config) -> View:
        """Return the view that ``loss.advantage`` names, or the class's own where it names none, with
        ``loss.advantage_epsilon`` where it divides by a group's std."""
        advantage, epsilon = config.loss.get("advantage"), config.loss.get("advantage_epsilon", 0.0)
        view: View = cls.view if advantage is None else ADVANTAGES[advantage]
        return partial(group_advantages, epsilon=epsilon) if epsilon and view is group_advantages else view

    def loss_denominator(self, batch: list[Example]) -> int:
        if self.config.loss.get("normalization", "token") != "token":
            return len(batch)  # every sequence counts as one (eq. 1's 1/|y|, Dr. GRPO)
        return sum(len(row.counted) for example in batch for row in example.rows)

    def arrange(self, batch: list[Example]) -> list[Example]:
        """Return the batch; with ``advantage=batch`` its advantages are normalised over it before it is
        split."""
        return normalised(batch) if self.config.loss.get("advantage") == "batch" else batch

    def compute_loss(self, micro: Microbatch, scores: TokenScores, prepared: None) -> LossResult:
        return self.loss(scores, micro.labels, **self.numbers(micro))


class CentredGRPOTrainer(GRPOTrainer):
    """Trainer of Dr. GRPO (Liu et al. 2025, arXiv 2503.20783), which does not divide advantages by their std:
    dividing would weigh prompts whose answers differ little as much as any other."""

    view = staticmethod(centred_advantages)
