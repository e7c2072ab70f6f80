"""The work around a run's steps: when to evaluate, when to save (``jobs.saving``), what to log
(``jobs.step_log``), and when to end."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.errors import Requeue
from common.progress import pause_together, phase
from data.batches import Segment
from jobs.diagnostics import Diagnostics
from jobs.evaluation import Evaluator, Metrics
from jobs.observers import Observers
from jobs.saving import EnoughError, Patience, Ranking, Saver
from jobs.signals import Signals
from jobs.step_log import StepLog, check_first_scores
from models.distributed import on_main
from models.watchdog import Watchdog
from reports.answers import FILE as ANSWERS
from reports.answers import keep_answers
from reports.evaluations import evaluation_lines
from reports.metrics import plain
from rollouts.verify import COLUMNS
from trainers.basic import BasicTrainer, StepRecord
from trainers.dealing import DealtBatch
from trainers.losses.base import TokenScores

ROUNDING = 1e-9
"""Tolerance for rounding when the completed share of a run is compared with a quarter."""


class RunWatch:
    """Follows a trainer (its ``Watch``). The line of step s in metrics.jsonl describes the weights before
    update s: their loss, and their evaluation if one was due."""

    def __init__(
        self,
        folder: Path,
        trainer: BasicTrainer,
        evaluator: Evaluator,
        total_steps: int,
        signals: Signals,
        diagnostics: Diagnostics | None,
        observers: Observers,
        inputs: Mapping[str, Any],
    ) -> None:
        """``inputs``: the fingerprints of what the run reads (``jobs.same_data``)."""
        config = self.config = trainer.config
        self.trainer, self.evaluator = trainer, evaluator
        self.diagnostics, self.signals = diagnostics, signals
        self.watchdog = Watchdog(trainer.world, config.watchdog_seconds)
        self.ranking, self.patience = Ranking(config.keep_best), Patience(config.patience)
        self.log = StepLog(folder, trainer, total_steps, observers)
        counted = (self.ranking, self.patience, diagnostics)
        self.saver = Saver(folder, trainer, self.log, *counted, signals, inputs)
        self.state = self.log.state
        self.after: Metrics = {}
        self.stopped_why: str | None = None

    # -- steps (trainers.basic.Watch) --------------------------------------------------------------

    def before_step(self, segment: Segment) -> None:
        step, first = self.trainer.progress.step, self.trainer.progress.step == 0
        self.signals.arm()
        self.watchdog.mark(f"step {step}, ready")
        self.saver.stop_if_requested()
        self.watchdog.mark(f"step {step}, under way")
        marks = dict(self.state.marks)
        self._diagnose(first)
        quarters = int(4 * segment.done(self.trainer.progress.position) + ROUNDING)
        if self._due("eval", self.config.eval_every, quarters) or first:
            try:
                self.state.evaluated = self._evaluate(first)
            except Requeue:
                self.state.marks = marks  # the evaluation is due again
                self.saver.stop_if_requested()
                raise
            if self.trainer.world.is_main and self.state.evaluated:
                for line in evaluation_lines(step, self.state.evaluated):
                    print(line, flush=True)
            self.patience.judge(self.ranking.score(self.state.evaluated))
            if first:
                self.state.before = self.state.evaluated
        every = self.config.eval_every if self.config.save_every is None else self.config.save_every
        if self._due("save", every, quarters) or first:
            self.saver.save_or_warn(first)
        if self.patience.spent:
            raise EnoughError(
                f"the last {self.patience.limit} evaluations of {self.config.keep_best} were no better than "
                "the best before them"
            )
        if (why := self.log.observers.stops(step)) is not None:
            raise EnoughError(why)
        self.log.step_begins()

    def observe(self, batch: DealtBatch, index: int, scores: TokenScores) -> None:
        """Pass a microbatch of a step to the diagnostics. A run that was asked to stop stops
        here: nothing but the gradients has changed since the step began."""
        n_microbatches = len(batch.microbatches)
        try:
            if n_microbatches > 1:
                pause_together()
        except Requeue:
            self.saver.stop_if_requested()
            raise
        if n_microbatches > 1:
            self.log.bar.desc = f"train (microbatch {index + 1}/{n_microbatches})"
        if index == self.trainer.progress.step == 0 and self.config.has_reference:
            check_first_scores(self.config, scores)
        if self.diagnostics is not None:
            self.diagnostics.observe(batch.microbatches[index], scores)

    def after_step(self, record: StepRecord) -> None:
        if self.diagnostics is not None:
            self.diagnostics.step_ends()
        self.log.step_ends(record)

    def done(self) -> None:
        self.log.close()
        self._diagnose(last=True)
        self.watchdog.close()
        try:
            self.after = self._evaluate(last=True)
        except Requeue:
            self.saver.stop_if_requested()
            raise
        self.saver.close()

    def stop_early(self, why: str) -> None:
        """Do the final work of a run whose training ends before its planned end."""
        step = self.trainer.progress.step
        if self.trainer.world.is_main:
            print(f"stopped before step {step}: {why}", flush=True)
        self.stopped_why, self.log.bar.total = why, step
        self.done()

    def _due(self, what: str, every: int | None, quarters: int = 0) -> bool:
        """Return whether another ``every`` examples have passed since this was last true (0: never; None:
        another quarter of the run)."""
        mark = quarters if every is None else self.trainer.progress.examples // every if every else 0
        due, self.state.marks[what] = mark > self.state.marks[what] >= 0, mark
        return due

    # -- evaluations -------------------------------------------------------------------------------

    def _diagnose(self, first: bool = False, last: bool = False) -> None:
        """Write a line of diagnostics if one is due."""
        if self.diagnostics is None:
            return
        if first:
            with phase("measure the entropy", "diagnostics"):
                self.diagnostics.begin(self.log.tracker)
        if last or self.diagnostics.due():
            self.log.flush()
            self.diagnostics.write(self.log.tracker)

    def _evaluate(self, first: bool = False, last: bool = False) -> Metrics:
        """Evaluate the current weights and return the metrics. A few samples go into the run's folder and to
        the tracker's table, after the line of the previous step."""
        self.log.flush()
        step, tracker = self.trainer.progress.step, self.log.tracker
        values = self.evaluator.evaluate(first)
        shows = (first or last) and self.evaluator.shown is not None
        if shows or self.evaluator.accuracy is not None:
            rows = self.evaluator.answers(first)
            tracker.table("samples", COLUMNS, rows, step)
            on_main(lambda: self._keep_answers(step, rows))
        for name, other in self.evaluator.named.items():
            if other.accuracy is not None:
                tracker.table(f"samples_{name}", COLUMNS, other.accuracy.samples, step)
        self.log.observers.tell("on_evaluation", step, plain(values), stop_at=step)
        return values

    def _keep_answers(self, step: int, rows: list[Any]) -> None:
        """Write sampled answers to the run's folder; a failed write is reported, and the run continues."""
        try:
            keep_answers(self.log.folder, step, COLUMNS, rows)
        except OSError as error:
            print(f"{self.log.folder / ANSWERS} could not be written: {error}", flush=True)

    # -- rounds of online training -----------------------------------------------------------------

    def before_round(self) -> None:
        """Save a checkpoint, unless ``save_every`` says that none is due yet.

        Without it, a killed run resumes from an earlier round, repeats the training since then, and reuses
        the rounds' files that it finds on disk."""
        self.saver.stop_if_requested()
        first, every = self.trainer.progress.step == 0, self.config.save_every
        if first or every is None or self._due("save", every):
            self.saver.save_or_warn(first)
