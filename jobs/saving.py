"""What keeps a run: its checkpoints, in the order of the metric that ``keep_best`` names; early stopping once
``patience`` evaluations in a row were no better than the best before them; how it ends when asked to stop."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from common.errors import Requeue, StoppedError
from common.progress import phase
from jobs.diagnostics import Diagnostics
from jobs.run_folder import INPUTS
from jobs.signals import Signals
from jobs.step_log import StepLog
from models.checkpoint import CheckpointError, Checkpoints, everywhere
from models.distributed import World, any_rank, from_main, on_main
from reports.answers import copy_answers
from reports.metrics import restore
from trainers.basic import BasicTrainer
from trainers.dealing import Progress


@dataclass(frozen=True)
class Ranking:
    """Converts values of a metric to scores, of which the higher is better."""

    metric: str | None

    def score(self, evaluated: Mapping[str, float | None]) -> float | None:
        """Return the score of an evaluation; None where the metric was not evaluated."""
        value = evaluated.get(self.metric or "")
        return -value if value is not None and str(self.metric).endswith("_loss") else value


class RankedCheckpoints(Checkpoints):
    """Checkpoints of which the best one by a ranking stays. Each records all that was evaluated at its step,
    so a run that goes on with another ``keep_best`` ranks its earlier checkpoints by the new metric too."""

    def __init__(self, folder: Path, world: World, keep: int, behind: bool, ranking: Ranking) -> None:
        super().__init__(folder, world, keep, behind)
        self.ranking = ranking

    def score(self, state: dict[str, Any]) -> float | None:
        return self.ranking.score(state.get("evaluated") or {})


class EnoughError(Exception):
    """Raised to end training before its planned end; the message says why.

    The final evaluation, checkpoint and export still have to be done."""


@dataclass
class Patience:
    """Counts evaluations without improvement. ``limit``: evaluations in a row; None for no early stop."""

    limit: int | None
    best: float | None = None
    no_better: int = 0

    def judge(self, score: float | None) -> None:
        """Record an evaluation's score, higher is better; None where nothing was evaluated."""
        if score is None:
            return
        if self.best is None or score > self.best:
            self.best, self.no_better = score, 0
        else:
            self.no_better += 1

    @property
    def spent(self) -> bool:
        return self.limit is not None and self.no_better >= self.limit


class Saver:
    """Saves a run and resumes it."""

    def __init__(
        self,
        folder: Path,
        trainer: BasicTrainer,
        log: StepLog,
        ranking: Ranking,
        patience: Patience,
        diagnostics: Diagnostics | None,
        signals: Signals,
        inputs: Mapping[str, Any],
    ) -> None:
        """``inputs``: the fingerprints of what the run reads (``jobs.same_data``)."""
        self.folder, self.trainer, self.log, self.state = folder, trainer, log, log.state
        self.ranking, self.patience, self.diagnostics = ranking, patience, diagnostics
        self.signals, self.inputs = signals, dict(inputs)
        signals.kept = self.kept
        config = trainer.config
        arguments = (trainer.world, config.keep_checkpoints, config.async_save, ranking)
        self.checkpoints = RankedCheckpoints(folder / "checkpoints", *arguments)
        self._saved: Progress | None = None
        self._failed: Exception | None = None

    # -- resuming ----------------------------------------------------------------------------------

    def resume(self) -> dict[str, Any] | None:
        """Resume from the newest sound checkpoint and return its state; None if there is no checkpoint."""
        on_main(self.checkpoints.remove_unfinished)
        path = self.checkpoints.newest_sound()
        if path is None:
            return None
        trainer = self.trainer
        state, mine = self.checkpoints.load(path, trainer.policy, trainer.optimizer, trainer.dealer.dealing)
        everywhere(lambda: self._restore(state, mine), path)
        on_main(lambda: restore(self.folder, path, trainer.progress.step))
        return state

    def _restore(self, state: dict[str, Any], mine: dict[str, Tensor]) -> None:
        """Restore the state that the run had when it wrote this checkpoint."""
        self.trainer.load_state_dict(state, mine)
        self._saved = replace(self.trainer.progress)
        self.log.restore(state)
        if state["keep_best"] == self.ranking.metric:  # else patience counts anew
            counted = state["patience"]
            self.patience.best, self.patience.no_better = counted["best"], counted["no_better"]
        if self.diagnostics is not None:
            self.diagnostics.restore(state["diagnostics"])

    # -- saving ------------------------------------------------------------------------------------

    def save(self) -> None:
        """Save a checkpoint before the next step."""
        self.log.flush()
        trainer = self.trainer
        state = (
            trainer.state_dict()
            | asdict(self.state)
            | {
                "wall": self.log.wall(),
                "keep_best": self.ranking.metric,
                "patience": {"best": self.patience.best, "no_better": self.patience.no_better},
                "wandb_id": self.log.tracker.wandb_id,
                "diagnostics": None if self.diagnostics is None else self.diagnostics.state(),
                "asked_to_stop": self.log.observers.state(),
                INPUTS: self.inputs,
            }
        )
        mine = trainer.reference.state()

        def records(part: Path) -> None:
            self.log.tracker.copy_to(part)
            copy_answers(self.folder, part)

        step = trainer.progress.step
        with phase("write a checkpoint", "save_every"):
            self.checkpoints.save(step, trainer.policy, trainer.optimizer, state, mine, records)
        self._saved = replace(trainer.progress)

    def save_or_warn(self, first: bool = False) -> None:
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
        self.state.saving_seconds += time.perf_counter() - begun

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

    def kept(self) -> str:
        """Return what is left of the run if it ends at once, in words."""
        if self._saved is None:
            return "no checkpoint is written yet"
        return f"the checkpoint before step {self._saved.step} is kept"

    # -- stopping ----------------------------------------------------------------------------------

    def stop_with(self, error: Exception) -> None:
        self._failed = error

    def stop_if_requested(self) -> None:
        """Save and raise Requeue, or the error of ``stop_with``, on every rank if it is so on any."""
        if any_rank(self.signals.stop_requested or self._failed is not None):
            self.close()  # if the disk is full, the run resumes from the checkpoint before
            if (failed := from_main(self._failed)) is not None:
                raise failed
            if self.trainer.world.is_main:
                print(
                    f"asked to stop before step {self.trainer.progress.step}; the same command with "
                    "resume=true goes on",
                    flush=True,
                )
            raise Requeue

    def between_stages(self) -> None:
        """Exit if asked to, between the stages of a round on rank 0. Its finished stages are on disk."""
        if self.signals.stop_requested:
            print("asked to stop: the same command with resume=true goes on with this round", flush=True)
            raise Requeue

    def close(self) -> None:
        """Save, also what a stop between two steps would lose (of a round, or of its scoring), and wait."""
        self.save_or_warn()
        self.settle()
