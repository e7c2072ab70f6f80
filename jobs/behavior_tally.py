"""How far the policy has gone from the one that wrote its samples, by the position of the token and by the
age of the sample: added up on the device, without making the host wait."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from data.types import Example, Microbatch
from jobs.sums import Sums
from jobs.tally import POSITIONS, rounded
from reports.behavior_charts import COLUMNS
from trainers.corrections import Behavior
from trainers.losses.base import TokenScores

AGES = 16
"""Bin 0 has samples of the very policy; bin a > 0 those 2^(a-1) to 2^a - 1 steps old; the last is open."""


class BehaviorTally(Sums):
    """Sums over the tokens seen since the last ``clear``, of this rank."""

    def __init__(self, device: torch.device) -> None:
        columns = len(COLUMNS)
        super().__init__({"positions": (POSITIONS, columns), "ages": (AGES, columns)}, device)
        self._powers = 2 ** torch.arange(max(POSITIONS, AGES), device=device)

    def add(self, micro: Microbatch, scores: TokenScores, step: int) -> None:
        """Take in the R rows of a microbatch of optimizer step ``step``; nothing of one without mu and
        without weights."""
        if micro.sequences.behavior_logprobs is None and scores.weights is None:
            return
        mask, behavior = scores.mask, Behavior.of(micro, scores.mask)
        log_ratio = torch.where(behavior.known, scores.policy.detach() - behavior.logprobs, 0.0).double()
        ratio = torch.where(behavior.known, log_ratio.exp(), 0.0)
        weight = mask.double() if scores.weights is None else torch.where(mask, scores.weights, 0.0).double()
        values = torch.stack(
            [
                mask.double(),
                behavior.known.double(),
                torch.expm1(log_ratio) - log_ratio,
                ratio,
                ratio.square(),
                weight,
                weight.square(),
                (mask & (weight == 0)).double(),
            ],
            dim=-1,
        )
        parts = self.parts
        place = torch.arange(1, mask.shape[1] + 1, device=mask.device)
        bins = torch.bucketize(place, self._powers[1:POSITIONS], right=True)
        parts["positions"].index_add_(0, bins, values.sum(dim=0))
        age, dated = self._ages(micro, step)
        parts["ages"].index_add_(0, age, values.sum(dim=1) * dated[:, None])

    def _ages(self, micro: Microbatch, step: int) -> tuple[Tensor, Tensor]:
        """([R] int64 the bin of each row's age, [R] float64 1 where it has one)."""
        sampled = [age_of(example, step) for example in micro.examples]
        rows = sampled * (len(micro.sequences.rows) // len(sampled))  # of pairs, the chosen stand first
        ages = torch.tensor(rows).to(micro.labels.device, non_blocking=True)
        bins = torch.bucketize(ages.clamp(min=0), self._powers[: AGES - 1], right=True)
        return bins, (ages >= 0).double()

    def describe(self, total: Sequence[float]) -> dict[str, list[list[float | None]]] | None:
        """``total`` as plain data: ``positions`` and ``ages``, a list of COLUMNS for each bin up to the last
        that has tokens. None where mu was known of no token and nothing was weighed."""
        parts = self.named(torch.tensor(total, dtype=torch.float64))
        every = dict(zip(COLUMNS, parts["positions"].sum(dim=0).tolist(), strict=True))
        if every["known"] == 0 and every["weight"] == every["tokens"]:
            return None
        out: dict[str, list[list[float | None]]] = {}
        for name, bins in parts.items():
            last = int(bins[:, 0].nonzero().max()) if bins[:, 0].any() else -1
            out[name] = [[rounded(value) for value in row] for row in bins[: last + 1].tolist()]
        return out


def age_of(example: Example, step: int) -> int:
    """Steps since the example was sampled; -1 where it was not sampled in this run, or fills a batch up."""
    return -1 if example.sampled_step is None else step - example.sampled_step
