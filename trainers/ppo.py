"""Offline, one-step PPO with a value head (Ethayarajh et al., 2024, arXiv 2402.01306). A desirable completion
gets reward 1 at its last token, an undesirable one -1; with ``loss.rewards=scores`` each gets its score. The
value head predicts the expected reward."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from config.schema import Config
from data import views
from data.types import Example, Microbatch, Sequences
from data.views import View
from models.distributed import sum_over_ranks
from models.sharding import reshard
from trainers.basic import BasicTrainer
from trainers.losses.base import LossResult, TokenScores, kl_term
from trainers.losses.ppo import gae
from trainers.scorer import TokenScorer


@dataclass(frozen=True)
class ValueScores(TokenScores):
    """Token scores together with the value head's estimates."""

    values: Tensor = field(kw_only=True)
    """[R, T] the value of the state before each completion token, with gradient"""


class ValueScorer(TokenScorer):
    """Scores rows under a policy with a value head: one forward gives log-probabilities and values."""

    def score(self, step: int, sequences: Sequences) -> ValueScores:
        policy, values = self.policy(sequences, values=True)
        return ValueScores(**vars(self.compared(step, sequences, policy)), values=values)


@dataclass(frozen=True)
class Targets:
    """Training targets of a microbatch's tokens, [R, T] each, without gradient."""

    advantages: Tensor
    returns: Tensor


class OfflinePPOTrainer(BasicTrainer[Targets]):
    view = staticmethod(views.labelled)
    feedback = ("pair", "random", "min", "group")
    labelled_examples = True
    beta_scales_rewards = False
    loss_keys = ("gamma", "lam", "rewards")
    scorer_class = ValueScorer

    @classmethod
    def view_of(cls, config: Config) -> View:
        return views.scored if config.loss.get("rewards") == "scores" else cls.view

    def loss_denominator(self, batch: list[Example]) -> int:
        return sum(len(row.counted) for example in batch for row in example.rows)

    @torch.no_grad()
    def prepare(self, batch: list[tuple[int, Microbatch]], scorer: TokenScorer) -> list[Targets]:
        """Return advantages and returns of every token, computed from the values before this step. The
        advantages are normalised over the global batch's completion tokens (population variance)."""
        targets = [self._targets(step, micro, scorer) for step, micro in batch]
        masks = [micro.sequences.mask for _, micro in batch]
        mean, std = moments([(t.advantages, mask) for t, mask in zip(targets, masks, strict=True)])
        return [
            Targets(torch.where(mask, (t.advantages - mean) / (std + 1e-8), 0.0), t.returns)
            for t, mask in zip(targets, masks, strict=True)
        ]

    def _targets(self, step: int, micro: Microbatch, scorer: TokenScorer) -> Targets:
        loss, penalty = self.config.loss, None
        if loss.get("kl_in", "loss") == "reward":
            scores = scorer.score_without_gradient(step, micro.sequences)
            assert isinstance(scores, ValueScores), "made by scorer_class"
            values, penalty = scores.values, loss["KL_coef"] * kl_term(scores, loss.get("kl_estimator", "k1"))
        else:
            values = self.policy(micro.sequences, values=True)[1]
            reshard(self.policy)
        decay = {"gamma": loss["gamma"], "lam": loss["lam"]}
        return Targets(*gae(values, micro.labels, micro.sequences.mask, **decay, penalty=penalty))

    def compute_loss(self, micro: Microbatch, scores: TokenScores, prepared: Targets) -> LossResult:
        assert isinstance(scores, ValueScores), "made by scorer_class"
        inputs = (scores, scores.values, prepared.advantages, prepared.returns)
        return self.loss(*inputs, **self.numbers(micro))


def moments(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return ([] mean, [] standard deviation) over all ranks; ``parts`` are pairs of values and a mask that
    selects among them."""
    doubles = [(values.double(), mask) for values, mask in parts]
    sums = [torch.stack([mask.sum().double(), torch.where(mask, v, 0.0).sum()]) for v, mask in doubles]
    count, total = sum_over_ranks(torch.stack(sums).sum(0))
    mean = total / count
    squares = [torch.where(mask, (v - mean).square(), 0.0).sum() for v, mask in doubles]
    return mean.float(), (sum_over_ranks(torch.stack(squares).sum()) / count).sqrt().float()
