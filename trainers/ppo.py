"""Offline, one-step PPO (Ethayarajh et al. 2024, arXiv 2402.01306): a desirable completion is paid 1 at its last token, an undesirable
one -1, and a value head says what was to be expected."""

from __future__ import annotations

import torch
from torch import Tensor

from data import views
from data.types import Example, Microbatch
from models.distributed import reshard, sum_over_ranks
from models.reference import Reference
from trainers.basic import BasicTrainer
from trainers.humanline import Humanline
from trainers.losses.base import LossResult, TokenScores
from trainers.losses.ppo import gae


class OfflinePPOTrainer(BasicTrainer):
    view = staticmethod(views.labelled)
    scales_rewards = False

    def units(self, batch: list[Example]) -> int:
        return sum(len(row.completion_ids) for example in batch for row in example.rows)

    @torch.no_grad()
    def prepare(
        self, batch: list[tuple[int, Microbatch]], reference: Reference, humanline: Humanline
    ) -> None:
        """Advantages and returns of every token from the values before this step, the advantages normalised over the global batch's
        completion tokens (population variance)."""
        loss = self.config.loss
        for _, micro in batch:
            values = self.policy(micro.sequences, values=True)[1]
            reshard(self.policy)
            advantages, returns = gae(
                values, micro.labels, micro.sequences.mask, gamma=loss["gamma"], lam=loss["lam"]
            )
            micro.scored |= {"advantages": advantages, "returns": returns}
        mean, std = moments([(micro.scored["advantages"], micro.sequences.mask) for _, micro in batch])
        for _, micro in batch:
            normalised = (micro.scored["advantages"] - mean) / (std + 1e-8)
            micro.scored["advantages"] = torch.where(micro.sequences.mask, normalised, 0.0)

    def logprobs(self, micro: Microbatch) -> Tensor:
        policy, micro.scored["values"] = self.policy(micro.sequences, values=True)
        return policy

    def compute_loss(self, micro: Microbatch, scores: TokenScores) -> LossResult:
        return self.loss(scores, micro.scored["values"], micro.scored["advantages"], micro.scored["returns"])


def moments(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """([] mean, [] std) over all ranks of the values at the masked places of (values, mask) pairs."""
    chosen = torch.cat([values[mask] for values, mask in parts]).double()
    count, total = sum_over_ranks(torch.stack([torch.full_like(chosen.sum(), len(chosen)), chosen.sum()]))
    mean = total / count
    return mean.float(), (sum_over_ranks((chosen - mean).square().sum()) / count).sqrt().float()
