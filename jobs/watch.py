"""What happens around the steps of a run: evaluating, logging, saving, stopping when asked to, and what is
left when it is done."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from torch import Tensor

from common.errors import StoppedError
from common.files import write_whole
from config.schema import Config
from data.batches import Segment, dealing
from data.types import Example, Microbatch
from jobs.diagnostics import Diagnostics
from jobs.evaluation import Evaluator, Metrics
from jobs.gate import check_first_scores
from jobs.patience import EnoughError, Patience
from jobs.signals import Requeue, Signals
from models.checkpoint import Checkpoints, everywhere
from models.checkpoint_reading import CheckpointError
from models.distributed import Watchdog, any_rank, from_main, on_main
from reports.answers import FILE as ANSWERS
from reports.answers import keep_answers
from reports.metrics import restore
from reports.progress import progress, status
from reports.tracking import NullTracker, Tracking
from rollouts.round_builder import TABLE_COLUMNS
from rollouts.verify import Accuracy
from trainers.basic import BasicTrainer, Progress, StepRecord
from trainers.corrections import with_sample_size
from trainers.losses.base import TokenScores


class RunWatch:
    """Follows a trainer (its ``Watch``). The line of step s in metrics.jsonl tells of the weights before
    update s: its loss, and the evaluation made then, if one was due."""

    def __init__(
        self,
        config: Config,
        folder: Path,
        trainer: BasicTrainer,
        evaluator: Evaluator,
        total_steps: int,
        signals: Signals,
        diagnostics: Diagnostics | None = None,
    ) -> None:
        self.config, self.folder, self.trainer, self.evaluator = config, folder, trainer, evaluator
        self.tracker: Tracking = NullTracker()
        self.signals, self.diagnostics = signals, diagnostics
        self.watchdog = Watchdog(trainer.world, config.watchdog_seconds)
        self.checkpoints = Checkpoints(folder / "checkpoints", trainer.world, config.keep_checkpoints)
        self.bar = progress(total_steps, "train", done=trainer.progress.step, shown=trainer.world.is_main)
        self.bar.wait()
        self.patience = Patience(config.patience)
        self._first_step = True
        self.before: Metrics = {}
        self.after: Metrics = {}
        self.seconds = 0.0
        self.tokens_timed = 0
        self._marks = {"eval": -1, "save": -1}
        self._evaluated: Metrics = {}
        self._round: dict[str, Any] = {}
        self._round_metrics: dict[str, Any] = {}
        self._saved: Progress | None = None
        self._pending: tuple[StepRecord, float] | None = None
        self._started = time.perf_counter()

    # -- resuming ----------------------------------------------------------------------------------

    def resume(self) -> dict[str, Any] | None:
        """Go on from the newest sound checkpoint; returns its state, None where there is none."""
        path = from_main(None if (found := self.checkpoints.newest_sound()) is None else str(found))
        if path is None:
            return None
        trainer = self.trainer
        dealt = dealing(trainer.packing)
        state, mine = self.checkpoints.load(Path(path), trainer.policy, trainer.optimizer, dealt)
        everywhere(lambda: self._restore(state, mine), Path(path))
        interval = trainer.progress.step if self.diagnostics is None else self.diagnostics.first
        on_main(lambda: restore(self.folder, Path(path), trainer.progress.step, interval))
        return state

    def _restore(self, state: dict[str, Any], mine: dict[str, Tensor]) -> None:
        """Be where the run was when it wrote this state."""
        trainer = self.trainer
        trainer.load_state_dict(state, mine)
        self._saved = replace(trainer.progress)
        self.bar.initial = self.bar.n = trainer.progress.step
        self._marks, self.before, self._evaluated = state["marks"], state["before"], state["evaluated"]
        self.seconds, self.tokens_timed = state["seconds"], state["tokens_timed"]
        self.patience.restore(state.get("patience", self.patience.state()))  # an earlier version has none
        if self.diagnostics is not None:
            self.diagnostics.restore(state["diagnostics"])

    def save(self) -> None:
        """A checkpoint before the next step."""
        self._flush()
        trainer = self.trainer
        state = trainer.state_dict() | {
            "marks": self._marks,
            "before": self.before,
            "evaluated": self._evaluated,
            "score": self._score(),
            "patience": self.patience.state(),
            "seconds": self.seconds,
            "tokens_timed": self.tokens_timed,
            "wandb_id": self.tracker.wandb_id,
            "diagnostics": None if self.diagnostics is None else self.diagnostics.state(),
        }
        mine = trainer.reference_scores()
        step, records = trainer.progress.step, self.tracker.copy_to
        self.checkpoints.save(step, trainer.policy, trainer.optimizer, state, mine, records)
        self._saved = replace(trainer.progress)

    def _score(self) -> float | None:
        """What ``keep_best`` ranks the checkpoint being saved by: higher is better; None where nothing was
        evaluated here."""
        value = self._evaluated.get(self.config.keep_best or "")
        return None if value is None else self._scored(value)

    def _scored(self, value: float) -> float:
        """A value of ``keep_best`` as a score, or a score as the value."""
        return -value if self.config.keep_best == "eval_loss" else value

    # -- the watch ---------------------------------------------------------------------------------

    def before_step(self) -> None:
        self.signals.arm()
        self.watchdog.mark(f"step {self.trainer.progress.step}, ready")
        self._stop_if_asked()
        self.watchdog.mark(f"step {self.trainer.progress.step}, under way")
        first = self.trainer.progress.step == 0
        self._diagnose(first)
        if self._due("eval", self.config.eval_every) or first:
            self._evaluated = self._evaluate(first)
            if self.trainer.world.is_main and self._evaluated:
                self.bar.say(evaluation_line(self.trainer.progress.step, self._evaluated))
            self.patience.judge(self._score())
            if first:
                self.before = self._evaluated
        if self._due("save", self.config.save_every or self.config.eval_every) or first:
            self._save_or_warn(first)
        if self.patience.spent:
            raise EnoughError
        self._started = time.perf_counter()

    def _diagnose(self, first: bool = False, last: bool = False) -> None:
        """A line of diagnostics, if one is due."""
        if self.diagnostics is None:
            return
        if first:
            self.diagnostics.begin(self.tracker)
        if last or self.diagnostics.due():
            self._flush()
            self.diagnostics.write(self.tracker)

    def _evaluate(self, first: bool = False) -> Metrics:
        """The evaluation of the weights as they are; a few samples go to the tracker's table, behind the line
        of the step before, and into the run's folder."""
        self._flush()
        values = self.evaluator.evaluate(first)
        if self.evaluator.accuracy is not None:
            step, rows = self.trainer.progress.step, self.evaluator.accuracy.samples
            self.tracker.table("samples", Accuracy.columns, rows, step)
            on_main(lambda: self._keep_answers(step, rows))
        return values

    def _keep_answers(self, step: int, rows: list[Any]) -> None:
        """Without room for them the run goes on."""
        try:
            keep_answers(self.folder, step, Accuracy.columns, rows)
        except OSError as error:
            self.bar.say(f"{self.folder / ANSWERS} could not be written: {error}")

    def _stop_if_asked(self) -> None:
        if any_rank(self.signals.asked):
            self._save_or_warn(
                first=False
            )  # without room for another, the checkpoint before it is gone on from
            if self.trainer.world.is_main:
                print(
                    f"asked to stop before step {self.trainer.progress.step}; the same command with "
                    "resume=true goes on",
                    flush=True,
                )
            raise Requeue

    def _save_or_warn(self, first: bool) -> None:
        """Nothing if this very place is saved already (a round began here). A run that cannot save does not
        start; one that no longer can goes on with what it has saved, and says so."""
        if self._saved == self.trainer.progress:
            return
        try:
            self.save()
        except CheckpointError as error:
            if first:
                raise StoppedError(str(error)) from error
            if self.trainer.world.is_main:
                print(f"{error}; the run goes on, the checkpoints before it stay", flush=True)

    def _due(self, what: str, every: int | None) -> bool:
        """Whether another ``every`` examples have gone by since this was last true."""
        mark = 0 if every is None else self.trainer.progress.examples // every
        due, self._marks[what] = mark > self._marks[what] >= 0, mark
        return due

    def before_first_step(self, segment: Segment) -> None:
        check_first_scores(self.trainer, segment)

    def observe(self, micro: Microbatch, scores: TokenScores) -> None:
        """Hand a microbatch of a step to the diagnostics."""
        if self.diagnostics is not None:
            self.diagnostics.observe(micro, scores)

    def after_step(self, record: StepRecord) -> None:
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
        )
        if skipped:
            line["skipped"] = True
        self.tracker.log(line)
        self.bar.set_postfix_str(status(line), refresh=False)
        self.bar.update()
        if self._first_step:
            self.bar.measure()
            self._first_step = False
        self._count_skipped(bool(skipped), record)

    def _count_skipped(self, skipped: bool, record: StepRecord) -> None:
        in_a_row = self.trainer.count_skipped(skipped)
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
        """Save, unless ``save_every`` says that it is not time yet: then a run that is killed goes on from an
        earlier round, trains again what it had trained, and finds the rounds' files as it makes them."""
        self._stop_if_asked()
        first, every = self.trainer.progress.step == 0, self.config.save_every
        if first or every is None or self._due("save", every):
            self._save_or_warn(first)

    def between_stages(self) -> None:
        """Between the stages of a round, on rank 0: leave if asked to. The round started with a checkpoint;
        what is done lies on disk."""
        if self.signals.asked:
            print("asked to stop: the same command with resume=true goes on with this round", flush=True)
            raise Requeue

    def round_started(self, facts: dict[str, Any], metrics: dict[str, Any], table: list[list[Any]]) -> None:
        self._round, self._round_metrics = facts, {f"round_{name}": value for name, value in metrics.items()}
        if table:
            self.tracker.table("samples", TABLE_COLUMNS, table, self.trainer.progress.step)
        if metrics and self.trainer.world.is_main:
            self.bar.say(round_line(facts["round"], metrics))

    def round_planned(self, round_: Segment) -> None:
        """Of a run's steps only those of the rounds so far are known: the others will have as many each."""
        at = self.trainer.progress
        if round_.end == 0:  # the run's examples are counted, and no round had any so far
            return
        self.bar.total = round((at.step - at.position + round_.steps) / round_.end)

    def trained_seconds(self) -> float:
        self._flush()
        return self.seconds

    def _of_round(self, record: StepRecord) -> dict[str, Any]:
        """What a step's line says of its round: which, how many steps ago its examples were sampled (their
        mean), and (once) what was sampled."""
        if not self._round:
            return {}
        metrics, self._round_metrics = self._round_metrics, {}
        sampled = [e.sampled_step for e in record.batch if e.sampled_step is not None]
        behind = record.known["step"] - fmean(sampled)
        staleness = int(behind) if behind.is_integer() else behind
        return {"round": self._round["round"], "staleness": staleness, **metrics}

    def stop_early(self) -> None:
        """What is to be done where training ends before its planned end."""
        step, best = self.trainer.progress.step, self.patience.best or 0.0
        if self.trainer.world.is_main:
            self.bar.say(
                f"stopped before step {step}: the last {self.patience.limit} evaluations of "
                f"{self.config.keep_best} were no better than the best before them ({self._scored(best):.4f})"
            )
        self.bar.total = step
        self.done()

    def done(self) -> None:
        self._flush()
        self.bar.close()
        self._diagnose(last=True)
        self.watchdog.close()
        self.after = self._evaluate()
        self._save_or_warn(first=False)


def evaluation_line(step: int, values: Metrics) -> str:
    """An evaluation in a line, for the terminal."""
    shown = (
        ("eval_reward_margin", "margin {:+.4f}"),
        ("eval_reward_accuracy", "reward accuracy {:.1%}"),
        ("eval_accuracy_sampled", "sampled accuracy {:.1%}"),
        ("eval_accuracy_greedy", "greedy accuracy {:.1%}"),
        ("eval_loss", "loss {:.4f}"),
        ("eval_kl_initial", "KL from the start {:.4f}"),
    )
    known = [form.format(values[key]) for key, form in shown if values.get(key) is not None]
    return f"evaluation at step {step}: {', '.join(known) or 'nothing to measure'}"


def round_line(index: int, metrics: dict[str, Any]) -> str:
    """A round's samples in a line, for the terminal."""
    reward = "no reward" if metrics["reward"] is None else f"reward {metrics['reward']:.3f}"
    return (
        f"round {index}: {metrics['contexts']} contexts, {metrics['keep_rate']:.0%} kept, {reward}, "
        f"{metrics['length']:.0f} tokens a sample, {metrics['finished']:.0%} finished; "
        f"sampled in {metrics['sample_seconds']:.1f} s, scored in {metrics['score_seconds']:.1f} s"
    )


def write_batch(path: Path, batch: list[Example]) -> str:
    """The rows of a batch as token ids, one example a line, for replay; returns where they are, or why they
    are not."""
    lines = [
        json.dumps(
            {
                "prompt_id": e.prompt_id,
                "label": e.label,
                "rows": [
                    {"prompt_ids": r.prompt_ids.tolist(), "completion_ids": r.completion_ids.tolist()}
                    | ({} if r.loss_mask is None else {"loss_mask": r.loss_mask.tolist()})
                    for r in e.rows
                ],
            }
        )
        for e in batch
    ]
    try:
        write_whole(path, "\n".join(lines) + "\n")
    except OSError as error:
        return f"the batch could not be written to {path} ({error})"
    return f"the batch is in {path}"
