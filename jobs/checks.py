"""Checks of a run's steps and rounds: the scores of policy and reference before the first step, and on
several ranks the weights after it; rounds from which nothing can be learnt; the batch of a skipped step."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common.errors import StoppedError
from common.files import on_disk, write_whole
from config.schema import Config
from data.types import Example
from data.views import exceeds
from models.distributed import gather_objects
from models.sharding import unlike_gathered
from trainers.basic import BasicTrainer
from trainers.losses.base import TokenScores

LIMIT = {"float32": 1e-3, "bfloat16": 0.1}
"""Largest difference, in nats, that rounding may cause between the two log-probabilities of a token, by
model.dtype."""


def check_first_scores(config: Config, scores: TokenScores) -> None:
    """Check that the log-probabilities of step 0 (its first microbatch) are finite and equal for policy and
    reference.

    Both have the same weights, so only rounding may make them differ. Raises StoppedError on every rank.
    """
    stays = scores.reference if scores.anchor is None else scores.anchor
    policy, reference = (torch.where(scores.mask, x.detach(), 0.0) for x in (scores.policy, stays))
    mine = (bool(policy.isfinite().all()), float((policy - reference).abs().nan_to_num(math.inf).max()))
    per_rank = gather_objects(mine)
    if not all(finite for finite, _ in per_rank):
        raise StoppedError(
            "the model's log-probabilities of the first batch are not finite (NaN or infinity) before step "
            f"0, though its weights are: its forward overflows with model.dtype={config.model.dtype} and "
            f"model.attn_implementation={config.model.attn_implementation}; try others, or another model"
        )
    worst, limit = max(worst for _, worst in per_rank), LIMIT[config.model.dtype]
    if worst > limit:
        raise StoppedError(
            "policy and reference are the same weights before step 0, yet a token's log-probability differs "
            f"by {worst:.3g} nats (limit {limit}): a stale score cache, or a kernel that varies by batch. "
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


def without_signal(index: int, metrics: dict[str, Any], config: Config) -> str | None:
    """Return a warning for round ``index`` if nothing in it tells a better answer from a worse one, with the
    spread of its rewards and what may be changed; None for any other round. ``metrics``: those of the round's
    samples."""
    lowest, highest = metrics.get("lowest_reward"), metrics.get("highest_reward")
    equal: Any = metrics.get("zero_variance")
    if lowest is None or highest is None:
        what = "no sample has a reward"
    elif not exceeds(highest, lowest):
        what = f"every sample has the reward {lowest:g}"
    elif config.rounds.feedback == "threshold" or (equal < 1 and metrics["keep_rate"] > 0):
        return None
    else:
        by = f" by rounds.tau={config.rounds.tau:g}" if equal < 1 else ""
        what = f"of no prompt two samples have rewards that differ{by}; all lie in [{lowest:g}, {highest:g}]"
    return (
        f"warning: round {index}: {what}, so there is nothing to learn from it. See whether reward="
        f"{config.reward_config.name} gets what it needs; if these rewards are right, other prompts, a "
        f"higher sampler.temperature ({config.sampler.temperature:g} now) or more rounds.samples "
        f"({config.rounds.samples} now) may give answers that differ (docs/symptoms.md)"
    )


def write_batch(path: Path, batch: list[Example]) -> str:
    """Write the rows of a batch as token ids, one example per line, for replay.

    Returns a sentence that names the file, or the reason why it could not be written."""
    lines = []
    for example in batch:
        names = ("prompt_ids", "completion_ids", "loss_mask")
        rows = [{name: getattr(row, name) for name in names} for row in example.rows]
        line = {"prompt_id": example.prompt_id, "label": example.label, "rows": rows}
        lines.append(json.dumps(line, default=np.ndarray.tolist) + "\n")
    try:
        write_whole(path, "".join(lines))
    except OSError as error:
        return f"the batch could not be written to {path} ({error}) {on_disk(path)}"
    return f"the batch is in {path}"
