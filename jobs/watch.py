"""The work around a run's steps: evaluating, logging, saving, stopping on request, and finishing."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from common.errors import Requeue, StoppedError
from common.progress import pause_together, phase, progress
from config.schema import Config
from data.batches import Segment, dealing
from data.types import Microbatch
from jobs.checks import check_first_scores, check_gathered_weights, without_signal, write_batch
from jobs.diagnostics import Diagnostics
from jobs.evaluation import Evaluator, Metrics
from jobs.observers import Observers
from jobs.ranking import EnoughError, Patience, RankedCheckpoints, Ranking
from jobs.same_data import DATA, INPUTS, hub_commits
from jobs.signals import Signals
from models.checkpoint import everywhere
from models.checkpoint_reading import CheckpointError
from models.distributed import StopRequest, any_rank, from_main, on_main
from models.watchdog import Watchdog
from reports.answers import FILE as ANSWERS
from reports.answers import copy_answers, keep_answers
from reports.evaluations import evaluation_lines
from reports.metrics import restore
from reports.progress import round_line, status
from reports.tracking import Tracking
from rollouts.round_builder import TABLE_COLUMNS
from rollouts.verify import COLUMNS
from trainers.basic import BasicTrainer, Progress, StepRecord
from trainers.corrections import with_sample_size
from trainers.losses.base import TokenScores

ROUNDING = 1e-9
"""Tolerance for rounding when the completed share of a run is compared with a quarter."""


class RunWatch:
    """Follows a trainer (its ``Watch``). The line of step s in metrics.jsonl describes the weights before
    update s: their loss, and their evaluation if one was due."""

    def __init__(
        self,
        config: Config,
        folder: Path,
        trainer: BasicTrainer,
        evaluator: Evaluator,
        total_steps: int,
        signals: Signals,
        diagnostics: Diagnostics | None = None,
        observers: Observers | None = None,
        inputs: Mapping[str, str] | None = None,
    ) -> None:
        """``inputs``: the fingerprints of what the run reads (``jobs.same_data``)."""
        self.inputs, self.ranking = dict(inputs or {}), Ranking(config.keep_best)
        self.observers = observers or Observers()
        self.config, self.folder, self.trainer, self.evaluator = config, folder, trainer, evaluator
        self.tracker: Tracking = Tracking()
        self.signals, self.diagnostics = signals, diagnostics
        self.request = StopRequest() if trainer.world.size > 1 else None
        signals.kept = self.kept
        self._micro = 0
        self._undo: Callable[[], None] = lambda: None
        self._failed: Exception | None = None
        self.watchdog = Watchdog(trainer.world, config.watchdog_seconds)
        checkpoint_arguments = (trainer.world, config.keep_checkpoints, config.async_save, self.ranking)
        self.checkpoints = RankedCheckpoints(folder / "checkpoints", *checkpoint_arguments)
        self.saving_seconds = 0.0
        """Seconds that steps have waited for checkpoints."""
        self.bar = progress(total_steps, "train", done=trainer.progress.step, shown=trainer.world.is_main)
        self.bar.wait()
        self.patience = Patience(config.patience)
        self.stopped_why: str | None = None
        self._first_step = True
        self.before: Metrics = {}
        self.after: Metrics = {}
        self.seconds = 0.0
        self.tokens_timed = 0
        self.wall = 0.0
        """Seconds that the bar has shown, evaluations, checkpoints and rounds included, in all starts."""
        self._marks = {"eval": -1, "save": -1}
        self._evaluated: Metrics = {}
        self._round: dict[str, Any] = {}
        self._round_metrics: dict[str, Any] = {}
        self._saved: Progress | None = None
        self._pending: tuple[StepRecord, float] | None = None
        self._unseen = trainer.world.size > 1
        """Whether the weights that the forward gathers are still to be compared with those that are kept."""
        self._started = self._began = time.perf_counter()

    # -- resuming ----------------------------------------------------------------------------------

    def resume(self) -> dict[str, Any] | None:
        """Resume from the newest sound checkpoint and return its state; None if there is no checkpoint."""
        on_main(self.checkpoints.remove_unfinished)
        path = self.checkpoints.newest_sound()
        if path is None:
            return None
        trainer = self.trainer
        dealt = dealing(trainer.packing, trainer.shares_prompts, trainer.work)
        state, mine = self.checkpoints.load(path, trainer.policy, trainer.optimizer, dealt)
        everywhere(lambda: self._restore(state, mine), path)
        interval = trainer.progress.step if self.diagnostics is None else self.diagnostics.first
        on_main(lambda: restore(self.folder, path, trainer.progress.step, interval))
        return state

    def _restore(self, state: dict[str, Any], mine: dict[str, Tensor]) -> None:
        """Restore the state that the run had when it wrote this checkpoint."""
        trainer = self.trainer
        own = {"marks": self._marks, "before": self.before, "evaluated": self._evaluated}
        own |= {"progress": asdict(trainer.progress), "tokens_timed": 0, "seconds": 0.0}
        for key, value in own.items():
            if not _alike(state[key], value):
                raise ValueError(f"state.json has a {key!r} that no run writes")
        trainer.load_state_dict(state, mine)
        self._saved = replace(trainer.progress)
        self.bar.initial = self.bar.n = trainer.progress.step
        self._marks, self.before, self._evaluated = state["marks"], state["before"], state["evaluated"]
        self.seconds, self.tokens_timed = state["seconds"], state["tokens_timed"]
        if self.ranking.is_of(state, shown=trainer.world.is_main):
            self.patience.restore(state["patience"])
        self.saving_seconds = state.get("saving_seconds", 0.0)
        self.wall = state["wall"]
        self.observers.restore(state.get("asked_to_stop"))
        if self.diagnostics is not None:
            self.diagnostics.restore(state["diagnostics"])

    def save(self) -> None:
        """Save a checkpoint before the next step."""
        self._flush()
        trainer = self.trainer
        state = trainer.state_dict() | {
            "marks": self._marks,
            "before": self.before,
            "evaluated": self._evaluated,
            "keep_best": self.ranking.metric,
            "score": self.ranking.score(self._evaluated),
            "patience": self.patience.state(),
            "seconds": self.seconds,
            "tokens_timed": self.tokens_timed,
            "saving_seconds": self.saving_seconds,
            "wall": self.wall + time.perf_counter() - self._began,
            "wandb_id": self.tracker.wandb_id,
            "diagnostics": None if self.diagnostics is None else self.diagnostics.state(),
            DATA: self.inputs.get(DATA),
            INPUTS: self.inputs | hub_commits(self.config),
        }
        if (asked := self.observers.state()) is not None:
            state["asked_to_stop"] = asked
        mine = trainer.reference_scores()

        def records(part: Path) -> None:
            self.tracker.copy_to(part)
            copy_answers(self.folder, part)

        step = trainer.progress.step
        with phase("write a checkpoint", "save_every"):
            self.checkpoints.save(step, trainer.policy, trainer.optimizer, state, mine, records)
        self._saved = replace(trainer.progress)

    # -- the watch ---------------------------------------------------------------------------------

    def kept(self) -> str:
        """Return what is left of the run if it ends at once, in words."""
        if self._saved is None:
            return "no checkpoint is written yet"
        return f"the checkpoint before step {self._saved.step} is kept"

    def before_step(self, segment: Segment) -> None:
        self.signals.arm(self.request)
        self.watchdog.mark(f"step {self.trainer.progress.step}, ready")
        self.stop_if_asked()
        self.watchdog.mark(f"step {self.trainer.progress.step}, under way")
        first, marks = self.trainer.progress.step == 0, dict(self._marks)
        self._diagnose(first)
        quarters = int(4 * segment.done(self.trainer.progress.position) + ROUNDING)
        if self._due("eval", self.config.eval_every, quarters) or first:
            try:
                self._evaluated = self._evaluate(first)
            except Requeue:
                self._marks = marks  # the evaluation is due again
                self.stop_if_asked()
                raise
            if self.trainer.world.is_main and self._evaluated:
                for line in evaluation_lines(self.trainer.progress.step, self._evaluated):
                    self.bar.say(line)
            self.patience.judge(self.ranking.score(self._evaluated))
            if first:
                self.before = self._evaluated
        every = self.config.eval_every if self.config.save_every is None else self.config.save_every
        if self._due("save", every, quarters) or first:
            self._save_or_warn(first)
        if self.patience.spent:
            raise EnoughError(
                f"the last {self.patience.limit} evaluations of {self.config.keep_best} were no better than "
                f"the best before them ({self.ranking.value(self.patience.best or 0.0):.4f})"
            )
        if (why := self.observers.stops(self.trainer.progress.step)) is not None:
            raise EnoughError(why)
        self._micro = 0
        if self.diagnostics is not None:
            self._undo = self.diagnostics.mark()
        self._started = time.perf_counter()

    def _diagnose(self, first: bool = False, last: bool = False) -> None:
        """Write a line of diagnostics if one is due."""
        if self.diagnostics is None:
            return
        if first:
            self.diagnostics.begin(self.tracker)
        if last or self.diagnostics.due():
            self._flush()
            self.diagnostics.write(self.tracker)

    def _evaluate(self, first: bool = False, last: bool = False) -> Metrics:
        """Evaluate the current weights and return the metrics. A few samples go into the run's folder and to
        the tracker's table, after the line of the previous step."""
        self._flush()
        values = self.evaluator.evaluate(first)
        shows = (first or last) and self.evaluator.shown is not None
        if shows or self.evaluator.accuracy is not None:
            step, rows = self.trainer.progress.step, self.evaluator.answers(first)
            self.tracker.table("samples", COLUMNS, rows, step)
            on_main(lambda: self._keep_answers(step, rows))
        for name, other in self.evaluator.named.items():
            if other.accuracy is not None:
                at, kept = self.trainer.progress.step, other.accuracy.samples
                self.tracker.table(f"samples_{name}", COLUMNS, kept, at)
        self.observers.evaluation(self.trainer.progress.step, values)
        return values

    def _keep_answers(self, step: int, rows: list[Any]) -> None:
        """Write sampled answers to the run's folder; a failed write is reported, and the run continues."""
        try:
            keep_answers(self.folder, step, COLUMNS, rows)
        except OSError as error:
            self.bar.say(f"{self.folder / ANSWERS} could not be written: {error}")

    def stop_with(self, error: Exception) -> None:
        self._failed = error

    def stop_if_asked(self) -> None:
        if any_rank(self.signals.asked or self._failed is not None):
            self._save_or_warn(first=False)  # if the disk is full, the run resumes from the checkpoint before
            self.settle()
            if (failed := from_main(self._failed)) is not None:
                raise failed
            if self.trainer.world.is_main:
                print(
                    f"asked to stop before step {self.trainer.progress.step}; the same command with "
                    "resume=true goes on",
                    flush=True,
                )
            raise Requeue

    def interrupted(self) -> None:
        """Save what a stop between two steps would lose: that of a round, or of its scoring."""
        self._save_or_warn(first=False)
        self.settle()

    def _save_or_warn(self, first: bool) -> None:
        """Save a checkpoint, unless this position is already saved (a round began here).

        A run that cannot save its first checkpoint does not start. If a later save fails, the run prints a
        warning and continues with the checkpoints that it has."""
        if self._saved == self.trainer.progress:
            return
        begun = time.perf_counter()
        self.settle()
        try:
            self.save()
            if first:
                self.checkpoints.finish()
        except CheckpointError as error:
            if first:
                raise StoppedError(str(error)) from error
            self._warn(error)
        self.saving_seconds += time.perf_counter() - begun

    def settle(self) -> None:
        """Wait for the checkpoint that is being written, if there is one."""
        try:
            self.checkpoints.finish()
        except CheckpointError as error:
            self._saved = None
            self._warn(error)

    def _warn(self, error: CheckpointError) -> None:
        if self.trainer.world.is_main:
            print(f"{error}; the run goes on, the checkpoints before it stay", flush=True)

    def _due(self, what: str, every: int | None, quarters: int = 0) -> bool:
        """Return whether another ``every`` examples have passed since this was last true (0: never; None:
        another quarter of the run)."""
        mark = quarters if every is None else self.trainer.progress.examples // every if every else 0
        due, self._marks[what] = mark > self._marks[what] >= 0, mark
        return due

    def before_first_step(self, segment: Segment) -> None:
        check_first_scores(self.trainer, segment)

    def observe(self, micro: Microbatch, scores: TokenScores) -> None:
        """Pass a microbatch of a step to the diagnostics, and count it. A run that was asked to stop stops
        here: nothing but the gradients has changed since the step began."""
        n_microbatches = self.trainer.microbatches_of_step
        try:
            if n_microbatches > 1:
                pause_together()
        except Requeue:
            self._undo()
            self.stop_if_asked()
            raise
        self._micro += 1
        if n_microbatches > 1:
            self.bar.desc = f"train (microbatch {self._micro}/{n_microbatches})"
        if self.diagnostics is not None:
            self.diagnostics.observe(micro, scores)

    def after_step(self, record: StepRecord) -> None:
        if self._unseen:
            check_gathered_weights(self.trainer)
            self._unseen = False
        self._flush()
        record.known |= self._evaluated | self._of_round(record)
        self._evaluated = {}
        self._pending = (record, time.perf_counter() - self._started)

    def _flush(self) -> None:
        """Write the line of the last step, whose numbers have reached the host by now."""
        if self._pending is None:
            return
        (record, seconds), self._pending = self._pending, None
        values = with_sample_size(record.pending.read())
        self.seconds, self.tokens_timed = self.seconds + seconds, self.tokens_timed + record.batch_tokens
        skipped = values.pop("skipped")
        chosen, rejected = values.get("reward_chosen"), values.get("reward_rejected")
        values["reward_margin"] = None if chosen is None or rejected is None else chosen - rejected
        speed = record.batch_tokens / seconds
        line: dict[str, Any] = (
            record.known
            | values
            | {
                "tokens_per_second": speed,
                "tokens_per_second_per_rank": speed / self.trainer.world.size,
                "seconds": seconds,
            }
            | gpu_memory(self.trainer.world.device)
        )
        if skipped:
            line["skipped"] = True
        self.tracker.log(line)
        self.observers.step(line)
        self.bar.desc = "train"
        self.bar.set_postfix_str(status(line), refresh=False)
        self.bar.update()
        if self._first_step:
            self.bar.measure()
            self._first_step = False
        silent = not values.get("grad_norm") or not self.trainer.has_signal(record.batch)
        self._count(bool(skipped), silent, record)

    def _count(self, skipped: bool, silent: bool, record: StepRecord) -> None:
        in_a_row = self.trainer.count(skipped, silent)
        if skipped and self.trainer.world.is_main:
            path = self.folder / "skipped" / f"step_{record.known['step']:08d}.jsonl"
            print(
                f"step {record.known['step']}: the gradient was not finite, the update was skipped; "
                f"{write_batch(path, record.batch)}",
                flush=True,
            )
        if in_a_row >= self.config.max_skipped_steps:
            raise StoppedError(
                f"{in_a_row} updates in a row had gradients that were not finite (max_skipped_steps); their "
                "batches are "
                f"in {self.folder / 'skipped'}: try a lower lr, or look at these rows"
            )

    # -- rounds of online training (jobs.online_source.RoundWatch) ---------------------------------

    def before_round(self) -> None:
        """Save a checkpoint, unless ``save_every`` says that none is due yet.

        Without it, a killed run resumes from an earlier round, repeats the training since then, and reuses
        the rounds' files that it finds on disk."""
        self.stop_if_asked()
        first, every = self.trainer.progress.step == 0, self.config.save_every
        if first or every is None or self._due("save", every):
            self._save_or_warn(first)

    def between_stages(self) -> None:
        """Exit if asked to, between the stages of a round on rank 0. Its finished stages are on disk."""
        if self.signals.asked:
            print("asked to stop: the same command with resume=true goes on with this round", flush=True)
            raise Requeue

    def round_started(self, facts: dict[str, Any], metrics: dict[str, Any], table: list[list[Any]]) -> None:
        self._round, self._round_metrics = facts, {f"round_{name}": value for name, value in metrics.items()}
        if table:
            self.tracker.table("round_samples", TABLE_COLUMNS, table, self.trainer.progress.step)
        if metrics and self.trainer.world.is_main:
            self.bar.say(round_line(facts["round"], metrics))
            if (warning := without_signal(facts["round"], metrics, self.config)) is not None:
                self.bar.say(warning)
        if metrics:
            self.observers.round(facts["round"], self.trainer.progress.step, metrics)

    def round_planned(self, round_: Segment) -> None:
        """Update the progress bar's number of steps, extrapolated from the rounds so far."""
        at = self.trainer.progress
        if round_.end == 0:  # with rounds.examples, if no round has given an example so far
            return
        self.bar.total = round((at.step - at.position + round_.steps) / round_.end)

    def trained_seconds(self) -> float:
        self._flush()
        return self.seconds

    def _of_round(self, record: StepRecord) -> dict[str, Any]:
        """Return the entries of a step's line about its round: its index, the mean number of steps since the
        batch's examples were sampled, and, in a round's first line, the metrics of its samples."""
        if not self._round:
            return {}
        metrics, self._round_metrics = self._round_metrics, {}
        sampled = [e.sampled_step for e in record.batch if e.sampled_step is not None]
        behind = record.known["step"] - fmean(sampled)
        staleness = int(behind) if behind.is_integer() else behind
        return {"round": self._round["round"], "staleness": staleness, **metrics}

    def stop_early(self, why: str) -> None:
        """Do the final work of a run whose training ends before its planned end."""
        step = self.trainer.progress.step
        if self.trainer.world.is_main:
            self.bar.say(f"stopped before step {step}: {why}")
        self.stopped_why, self.bar.total = why, step
        self.done()

    def done(self) -> None:
        self._flush()
        self.wall += time.perf_counter() - self._began
        if self.seconds:
            speed = self.tokens_timed / self.seconds
            self.bar.set_postfix_str(f"{speed:,.0f} tokens/s in steps", refresh=False)
        self.bar.close()
        self._diagnose(last=True)
        self.watchdog.close()
        try:
            self.after = self._evaluate(last=True)
        except Requeue:
            self.stop_if_asked()
            raise
        self._save_or_warn(first=False)
        self.settle()


def gpu_memory(device: torch.device) -> dict[str, float]:
    """Return the peak memory of tensors on this rank's GPU so far, GiB; {} without a GPU."""
    return (
        {"gpu_memory_gib": torch.cuda.max_memory_allocated(device) / 2**30} if device.type == "cuda" else {}
    )


def _alike(saved: Any, own: Any) -> bool:
    """Return whether a checkpoint's value is of the kind that this run would write."""
    if isinstance(own, dict):
        return isinstance(saved, dict) and all(
            _alike(value, own[key]) if key in own else value is None or isinstance(value, int | float)
            for key, value in saved.items()
        )
    if isinstance(own, float):
        return isinstance(saved, int | float) and math.isfinite(saved)
    return type(saved) is type(own)
