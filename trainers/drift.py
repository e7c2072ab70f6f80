"""Distance of the policy from the initial weights and from its reference."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from data.batches import to_device
from data.types import Microbatch
from models.distributed import sum_over_ranks
from trainers.losses.base import Mean, TokenScores, kl_estimate, mean_where


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
