"""BCO trainer, a classifier of desirable and undesirable completions whose threshold is a running mean of the
rewards."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from config.schema import Config
from data import views
from data.types import Example, Microbatch
from models.distributed import World, sum_over_ranks
from trainers.basic import BasicTrainer
from trainers.losses.base import LossResult, Mean, TokenScores


class BCOTrainer(BasicTrainer[None]):
    view = staticmethod(views.labelled)
    labelled_examples = True

    def __init__(
        self, config: Config, policy: nn.Module, loss: Callable[..., LossResult], world: World
    ) -> None:
        super().__init__(config, policy, loss, world)
        # Sum and count of the desirable rewards so far, then of the others. They are a buffer of the policy's
        # module so that checkpoints include them.
        policy.register_buffer("reward_totals", torch.zeros(4, dtype=torch.float64, device=world.device))
        self.totals = policy.get_buffer("reward_totals")

    def loss_denominator(self, batch: list[Example]) -> int:
        return len(batch)

    def compute_loss(self, micro: Microbatch, scores: TokenScores, prepared: None) -> LossResult:
        return self.loss(scores, micro.labels > 0, self.shift, **self.numbers(micro))

    @property
    def shift(self) -> Tensor:
        """[] delta: the average of the desirable and the undesirable mean reward over all batches before this
        one, so that no batch has to be run twice. It is 0 at the first step, where every reward is 0. While
        only one kind has been seen, it is half of that kind's mean."""
        total, count = self.totals[0::2], self.totals[1::2]
        return (total / count.clamp(min=1)).mean().float()

    def after_backward(self, metrics: list[dict[str, Mean]]) -> None:
        """Add the batch's rewards to the running means, unless they are not finite: the batch's update is
        skipped then, and one such sum would make delta nan for ever."""
        seen = [values[name] for values in metrics for name in ("reward_chosen", "reward_rejected")]
        batch = (
            torch.stack([part.double() for mean in seen for part in mean]).view(len(metrics), 4).sum(dim=0)
        )
        batch = sum_over_ranks(batch)
        self.totals += torch.where(batch.isfinite().all(), batch, 0.0)
