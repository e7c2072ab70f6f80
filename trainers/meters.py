"""Metrics as sums and counts, added up over microbatches, reduced over ranks in one collective, and read one
step late.

Reading a device tensor makes the host wait for the device; a step never does so. ``Meters.reduce`` starts the
copy, and ``Pending.read`` is called when the next step is already under way.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from data.batches import to_device
from data.types import Microbatch
from models.distributed import sum_over_ranks
from trainers.losses.base import Mean, TokenScores, kl_estimate, mean_where


class Pending:
    """Reduced metrics on their way to the host."""

    def __init__(self, names: list[str], values: Tensor) -> None:
        """``values``: [2, names] float64, the sums and the counts of the global batch."""
        self.names = names
        self.host = values.to("cpu", non_blocking=True)
        self.ready = torch.cuda.Event() if values.is_cuda else None
        if self.ready is not None:
            self.ready.record()

    def read(self) -> dict[str, float | None]:
        """Return the means; None where the count is 0 (for instance, no desirable example in the batch)."""
        if self.ready is not None:
            self.ready.synchronize()
        sums, counts = self.host.tolist()
        return {n: s / c if c else None for n, s, c in zip(self.names, sums, counts, strict=True)}


class Meters:
    """One step's metrics. Every rank adds the same names in the same order."""

    def __init__(self) -> None:
        self.parts: dict[str, list[Mean]] = {}

    def add(self, metrics: Mapping[str, Mean]) -> None:
        for name, value in metrics.items():
            self.parts.setdefault(name, []).append(value)

    def reduce(self) -> Pending:
        names = list(self.parts)
        sums = [torch.stack([r.sum.detach().double() for r in self.parts[n]]).sum() for n in names]
        counts = [torch.stack([r.count.detach().double() for r in self.parts[n]]).sum() for n in names]
        return Pending(names, sum_over_ranks(torch.stack([torch.stack(sums), torch.stack(counts)])))


def change_since(
    micro: Microbatch, scores: TokenScores, before: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor]:
    """Return ([R] the change of each row's log-probability since ``before`` (row key -> [C], nats), in nats;
    [R] bool, whether that change is known)."""
    rows = [before.get(row.key) for row in micro.sequences.rows]
    sums = [math.nan if row is None else float(row.sum()) for row in rows]
    old = to_device(torch.tensor(sums, dtype=torch.float32), scores.mask.device)
    comparable = ~old.isnan() & scores.valid
    return torch.where(scores.mask, scores.policy.detach(), 0.0).sum(dim=-1) - old, comparable


def mean_log_ratio(micro: Microbatch, scores: TokenScores, before: Mapping[str, Tensor]) -> Mean:
    """Return the mean token log-ratio of the policy to ``before`` (row key -> [C], nats), over the rows
    that ``before`` has."""
    change, comparable = change_since(micro, scores, before)
    tokens = torch.where(comparable, scores.mask.sum(dim=-1), 0).sum()
    return Mean(mean_where(change, comparable).sum, tokens)


def reference_kl(scores: TokenScores) -> Mean:
    """Return KL(policy || reference) of a microbatch by the k3 estimator, averaged over its completion
    tokens, in nats per token. Humanline does not clip it."""
    values = kl_estimate(scores.policy.detach(), scores.reference, scores.mask)
    return mean_where(values, scores.mask)


def global_mean(parts: Sequence[Mean]) -> float:
    """Return the mean over the global batch, the same on every rank. The host waits for the device."""
    halves = [torch.stack([part.sum.double(), part.count.double()]) for part in parts]
    total, count = sum_over_ranks(torch.stack(halves).sum(dim=0)).tolist()
    return float(total / max(count, 1.0))
