"""Checks of a run's first step: the scores of policy and reference before it, and on several ranks the
weights after it."""

from __future__ import annotations

import math

import torch

from common.errors import StoppedError
from data.batches import Segment
from models.distributed import gather_objects, unlike_gathered
from trainers.basic import BasicTrainer
from trainers.humanline import Humanline

LIMIT = {"float32": 1e-3, "bfloat16": 0.1}
"""Largest difference, in nats, that rounding may cause between the two log-probabilities of a token, by
model.dtype."""


def check_first_scores(trainer: BasicTrainer, segment: Segment) -> None:
    """Check that the first batch's log-probabilities are finite and equal for policy and reference.

    Before step 0 both have the same weights, so only rounding may make them differ. Raises StoppedError on
    every rank.
    """
    config = trainer.config
    micro = trainer.microbatches(segment.batch(0))[0]
    scores = trainer.scorer_with(trainer.reference, Humanline()).score_without_gradient(0, micro.sequences)
    policy, reference = (torch.where(scores.mask, x, 0.0) for x in (scores.policy, scores.reference))
    mine = (bool(policy.isfinite().all()), float((policy - reference).abs().nan_to_num(math.inf).max()))
    per_rank = gather_objects(mine)
    if not all(finite for finite, _ in per_rank):
        raise StoppedError(
            "the model's log-probabilities of the first batch are not finite (NaN or infinity) before step "
            "0, though its weights "
            f"are: its forward overflows with model.dtype={config.model.dtype} and "
            f"model.attn_implementation={config.model.attn_implementation}; try others, or another model"
        )
    worst, limit = max(worst for _, worst in per_rank), LIMIT[config.model.dtype]
    if worst > limit:
        raise StoppedError(
            "policy and reference are the same weights before step 0, yet a token's log-probability differs "
            "by "
            f"{worst:.3g} nats (limit {limit}): a stale score cache, or an attention kernel that depends on "
            "the batch. "
            f"Delete {config.cache_dir} and try again, or try another model.attn_implementation"
        )


def check_gathered_weights(trainer: BasicTrainer) -> None:
    """Check, after an update on several ranks, that the forward gathers the weights that checkpoints and the
    export hold. Raises StoppedError on every rank."""
    unlike = sorted(set().union(*gather_objects(unlike_gathered(trainer.policy))))
    if unlike:
        raise StoppedError(
            f"after an update the forward reads other values of {', '.join(unlike[:3])} than the state dict "
            "has, so the run would export another model than it trains; train on one rank, and report the "
            "model's architecture and the number of ranks"
        )
