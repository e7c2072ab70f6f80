"""The lines of a run: one a step in metrics.jsonl, with its speed and its round, and the bar beside them; and
checks of a run's steps and rounds: the scores of policy and reference before the first step, and on several
ranks the weights after it; rounds from which nothing can be learnt; the batch of a skipped step."""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass, field, fields
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch

from common.errors import StoppedError
from common.files import on_disk, write_whole
from common.progress import Bar, progress, seconds_so_far
from config.schema import Config
from data.batches import Segment
from data.types import Example
from data.views import exceeds
from jobs.evaluation import Metrics
from jobs.memory import NEAR, MemoryPlan, measured, to_use
from jobs.observers import Observers
from models.distributed import gather_objects
from models.sharding import unlike_gathered
from reports.evaluations import round_line, status
from reports.metrics import plain
from reports.tracking import Tracker
from rollouts.round_builder import TABLE_COLUMNS
from trainers.basic import BasicTrainer, StepRecord
from trainers.corrections import with_sample_size
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
    lowest: Any = metrics.get("lowest_reward")
    highest: Any = metrics.get("highest_reward")
    found = "no sample has a reward" if lowest is None else f"all rewards lie in [{lowest:g}, {highest:g}]"
    if lowest is not None and exceeds(highest, lowest):
        if config.rounds.feedback == "threshold" or (
            metrics["zero_variance"] < 1 and metrics["keep_rate"] > 0
        ):
            return None
        found += f", and no two of a prompt differ (rounds.tau={config.rounds.tau:g})"
    return (
        f"warning: round {index}: {found}, so there is nothing to learn from it. See whether reward="
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


@dataclass
class RunState:
    """What a run carries from step to step beside its trainer, as its checkpoints have it."""

    marks: dict[str, int] = field(default_factory=lambda: {"eval": -1, "save": -1})
    """How often an evaluation and a checkpoint were due so far, by ``RunWatch._due``."""
    before: Metrics = field(default_factory=dict)
    """The evaluation of the initial weights."""
    evaluated: Metrics = field(default_factory=dict)
    """The evaluation before the next step, if there was one."""
    seconds: float = 0.0
    """Seconds of all steps in all starts, and the tokens of these steps."""
    tokens_timed: int = 0
    saving_seconds: float = 0.0
    """Seconds that steps have waited for checkpoints."""
    rounds: dict[str, str] = field(default_factory=dict)
    """Finished round -> the seal of its record."""
    wall: float = 0.0
    """Seconds that the bar has shown, evaluations, checkpoints and rounds included, in all starts."""


class StepLog:
    """Writes a step's line when the next one is under way: its numbers have reached the host by then."""

    def __init__(
        self, folder: Path, trainer: BasicTrainer, total_steps: int, observers: Observers | None = None
    ) -> None:
        self.folder, self.trainer, self.state = folder, trainer, RunState()
        self.observers = observers or Observers()
        self.tracker = Tracker()
        self.bar = progress(total_steps, "train", done=trainer.progress.step, shown=trainer.world.is_main)
        self.bar.wait()
        self._pending: tuple[StepRecord, float] | None = None
        self._first = True
        self.memory: MemoryPlan | None = None
        """The plan that is compared with what the fullest rank held, once, after the widest microbatch."""
        self._unseen = trainer.world.size > 1
        """Whether the weights that the forward gathers are still to be compared with those that are kept."""
        self._round: int | None = None
        self._round_metrics: dict[str, Any] = {}
        self._started = self._began = time.perf_counter()

    def restore(self, state: dict[str, Any]) -> None:
        """Go on with a checkpoint's state, in place."""
        for item in fields(RunState):
            setattr(self.state, item.name, state.get(item.name, getattr(self.state, item.name)))
        self.bar.initial = self.bar.n = self.trainer.progress.step
        self.observers.restore(state.get("asked_to_stop"))

    def wall(self) -> float:
        """Return the seconds of all starts until now."""
        return self.state.wall + time.perf_counter() - self._began

    # -- steps -------------------------------------------------------------------------------------

    def step_begins(self) -> None:
        self._started = time.perf_counter()

    def step_ends(self, record: StepRecord) -> None:
        if self._first and self._pending is None and Bar.opened:
            self.bar.desc = "first step and its reference (model.batch_size, model.max_length)"
            print(f"seconds until the first update: {seconds_so_far()}", flush=True)
            self.bar.desc = "train"
        if self._unseen:
            check_gathered_weights(self.trainer)
            self._unseen = False
        if self.memory is not None and record.widest >= NEAR * self.memory.load.tokens:
            found = measured(self.trainer.world, self.memory)
            more = to_use(self.memory, found["measured_gib"], record.widest)
            print(f"memory so far: {found['measured']}{more}", flush=True)
            self.memory = None
        self.flush()
        record.known |= self.state.evaluated | self._of_round(record)
        self.state.evaluated = {}
        self._pending = (record, time.perf_counter() - self._started)

    def flush(self) -> None:
        """Write the line of the last step, whose numbers have reached the host by now."""
        if self._pending is None:
            return
        (record, seconds), self._pending = self._pending, None
        values = with_sample_size(record.pending.read())
        self.state.seconds += seconds
        self.state.tokens_timed += record.batch_tokens
        skipped = values.pop("skipped")
        chosen, rejected = values.get("reward_chosen"), values.get("reward_rejected")
        values["reward_margin"] = None if chosen is None or rejected is None else chosen - rejected
        speed = record.batch_tokens / seconds
        ranks, device = self.trainer.world.size, self.trainer.world.device
        line: dict[str, Any] = record.known | values
        line |= {"tokens_per_second": speed, "tokens_per_second_per_rank": speed / ranks, "seconds": seconds}
        if device.type == "cuda":  # the peak of tensors on this rank's GPU so far
            line["gpu_memory_gib"] = torch.cuda.max_memory_allocated(device) / 2**30
        if skipped:
            line["skipped"] = True
        self.tracker.log(line)
        # A stop takes effect before the step after the one that runs now.
        self.observers.tell("on_step", plain(line), stop_at=line["step"] + 2)
        self.bar.desc = "train"
        self.bar.set_postfix_str(status(line), refresh=False)
        self.bar.update()
        if self._first:
            self.bar.measure()
            self._first = False
        silent = not values.get("grad_norm") or not self.trainer.has_signal(record.batch)
        self._count(bool(skipped), silent, record)

    def _count(self, skipped: bool, silent: bool, record: StepRecord) -> None:
        in_a_row = self.trainer.progress.count(skipped, silent)
        if skipped and self.trainer.world.is_main:
            path = self.folder / "skipped" / f"step_{record.known['step']:08d}.jsonl"
            print(
                f"step {record.known['step']}: the gradient was not finite, the update was skipped; "
                f"{write_batch(path, record.batch)}",
                flush=True,
            )
        if in_a_row >= self.trainer.config.max_skipped_steps:
            raise StoppedError(
                f"{in_a_row} updates in a row had gradients that were not finite (max_skipped_steps); their "
                f"batches are in {self.folder / 'skipped'}: try a lower lr, or look at these rows"
            )

    def close(self) -> None:
        """Write the last line and close the bar."""
        self.flush()
        self.state.wall, self._began = self.wall(), time.perf_counter()
        self.bar.close()

    # -- rounds ------------------------------------------------------------------------------------

    def round_started(self, index: int, metrics: dict[str, Any], table: list[list[Any]]) -> None:
        self._round, self._round_metrics = index, {f"round_{name}": value for name, value in metrics.items()}
        if table:
            self.tracker.table("round_samples", TABLE_COLUMNS, table, self.trainer.progress.step)
        if metrics and self.trainer.world.is_main:
            print(round_line(index, metrics), flush=True)
            if (warning := without_signal(index, metrics, self.trainer.config)) is not None:
                print(warning, flush=True)
        if metrics:
            self.observers.tell("on_round", index, plain(metrics), stop_at=self.trainer.progress.step)

    def round_planned(self, round_: Segment) -> None:
        """Update the progress bar's number of steps, extrapolated from the rounds so far."""
        at = self.trainer.progress
        if round_.end == 0:  # with rounds.examples, if no round has given an example so far
            return
        self.bar.total = round((at.step - at.position + round_.steps) / round_.end)

    def _of_round(self, record: StepRecord) -> dict[str, Any]:
        """Return the entries of a step's line about its round: its index, the mean number of steps since the
        batch's examples were sampled, and, in a round's first line, the metrics of its samples."""
        if self._round is None:
            return {}
        metrics, self._round_metrics = self._round_metrics, {}
        sampled = [e.sampled_step for e in record.batch if e.sampled_step is not None]
        behind = record.known["step"] - fmean(sampled)
        staleness = int(behind) if behind.is_integer() else behind
        return {"round": self._round, "staleness": staleness, **metrics}
