"""Trainers for losses on pairs of a chosen and a rejected completion: DPO and its variants, and the
Bradley-Terry reward model."""

from __future__ import annotations

from data import views
from data.types import Example, Microbatch
from trainers.basic import BasicTrainer
from trainers.losses.base import LossResult, TokenScores, token_sum


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


class RewardTrainer(PairedPreferenceTrainer):
    """Trains a scalar head on pairs. The policy is a models.heads.RewardModel, whose forward gives each row's
    reward at its last token. It is exported as a stock sequence classifier, which ``reward=bradley_terry``
    scores with."""

    online = False
    logprob_range = False
    beta_scales_rewards = False

    def compute_loss(self, micro: Microbatch, scores: TokenScores, prepared: None) -> LossResult:
        chosen, rejected = scores.split(len(micro.examples))
        rewards = (token_sum(side.policy, side.mask) for side in (chosen, rejected))
        return self.loss(*rewards, chosen.valid & rejected.valid, **self.numbers(micro))
