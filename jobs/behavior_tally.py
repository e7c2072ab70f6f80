"""Accumulate how far the policy is from the behavior policy that wrote its samples, by token position and by
sample age, on the device and without host synchronisation."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from data.batches import to_device
from data.types import Example, Microbatch
from jobs.sums import Sums
from jobs.tally import POSITIONS, rounded
from reports.metrics import COLUMNS
from trainers.corrections import Behavior
from trainers.losses.base import TokenScores

AGES = 16
"""Number of age bins. Bin 0 holds samples of the current policy, bin a > 0 samples 2^(a-1) to 2^a - 1 steps
old; the last bin is open."""


class BehaviorTally(Sums):
    """Sums over the tokens that this rank has seen since the last ``clear``."""

    def __init__(self, device: torch.device) -> None:
        columns = len(COLUMNS)
        super().__init__({"positions": (POSITIONS, columns), "ages": (AGES, columns)}, device)
        self._powers = 2 ** torch.arange(max(POSITIONS, AGES), device=device)

    def add(self, micro: Microbatch, scores: TokenScores, step: int) -> None:
        """Add the R rows of a microbatch of optimizer step ``step``.

        A microbatch without behavior log-probabilities (mu) and without weights adds nothing."""
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
        """Return ([R] int64 age bin of each row, [R] float64 indicator: 1 where the row has an age)."""
        sampled = [age_of(example, step) for example in micro.examples]
        rows = sampled * (len(micro.sequences.rows) // len(sampled))  # for pairs, all chosen rows come first
        ages = to_device(torch.tensor(rows), micro.labels.device)
        bins = torch.bucketize(ages.clamp(min=0), self._powers[: AGES - 1], right=True)
        return bins, (ages >= 0).double()

    def describe(self, total: Sequence[float]) -> dict[str, list[list[float | None]]] | None:
        """Return ``total`` as plain data: ``positions`` and ``ages``, each a list of bins with the COLUMNS.

        The lists end with the last bin that has tokens. None if mu was known for no token and no token was
        reweighted."""
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
    """Return the number of steps since the example was sampled.

    -1 for an example that was not sampled in this run, or that only fills up a batch."""
    return -1 if example.sampled_step is None else step - example.sampled_step
