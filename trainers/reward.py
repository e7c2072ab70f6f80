"""Trainer of the Bradley-Terry reward model, a scalar head trained on pairs. The policy is a
models.heads.RewardModel, whose forward gives each row's reward at its last token. It is exported as a stock
sequence classifier, which ``reward=bradley_terry`` scores with."""

from __future__ import annotations

from data.types import Microbatch
from trainers.losses.base import LossResult, TokenScores, token_sum
from trainers.paired import PairedPreferenceTrainer


class RewardTrainer(PairedPreferenceTrainer):
    online = False
    logprob_range = False
    beta_scales_rewards = False

    def compute_loss(self, micro: Microbatch, scores: TokenScores, prepared: None) -> LossResult:
        chosen, rejected = scores.split(len(micro.examples))
        rewards = (token_sum(side.policy, side.mask) for side in (chosen, rejected))
        return self.loss(*rewards, chosen.valid & rejected.valid, **self.numbers(micro))
