"""Online training as a source of segments: one round after another, each sampled from the policy as it is
when the round starts.

That is all that online training adds. The trainer pulls a round when the one before is used up; optimizer,
schedule and sync phase go on as if nothing had happened, and the reference becomes the policy at the round's
start as it does for any segment.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol

from common.errors import StoppedError
from common.worker_process import WorkerError
from config.schema import Config
from data.batches import Segment
from data.chat import Renderer
from data.examples import make_examples
from data.views import View
from models.distributed import local
from models.reference import weights_fingerprint
from reports.metrics import read_metrics
from rollouts.engines import Engine, Prefetch
from rollouts.ledger import RoundFolder
from rollouts.rewards.base import RewardError
from rollouts.round_builder import RoundBuilder, samples_table
from rollouts.rounds import PromptSchedule
from trainers.basic import BasicTrainer

Facts = dict[str, Any]


class RoundWatch(Protocol):
    """Who follows the rounds of a run, beside its steps."""

    def before_round(self) -> None:
        """Save: what is sampled next comes from this checkpoint."""

    def round_started(self, facts: Facts, metrics: Facts, table: list[list[Any]]) -> None:
        """A round is trained on from here on. ``facts`` (``round``, ``sampled_step``) belong to each of its
        steps, ``metrics`` and the ``table`` of samples to its first one; both are empty where training goes
        on inside a round."""

    def trained_seconds(self) -> float:
        """Spent in steps so far, in all processes of the run."""


class OnlineSource:
    """The rounds of a run (a ``trainers.basic.Source``). Every rank has one and calls it alike; rank 0's
    ``builder`` makes rounds."""

    def __init__(
        self,
        config: Config,
        trainer: BasicTrainer,
        renderer: Renderer,
        contexts: PromptSchedule,
        engine: Engine,
        builder: RoundBuilder | None,
        folder: Path,
        watch: RoundWatch,
    ) -> None:
        """``builder`` is None on ranks above 0; ``folder`` is the run's."""
        self.config, self.trainer, self.renderer, self.contexts = config, trainer, renderer, contexts
        self.engine, self.builder, self.folder, self.watch = engine, builder, folder, watch
        self.view = view_of_rounds(config, trainer.view_of(config))
        self._entered: float | None = None
        self._prefetch: Prefetch | None = None

    def round(self, index: int) -> RoundFolder:
        return RoundFolder(self.folder / "rounds" / f"{index:03d}")

    def segment(self, index: int) -> Segment | None:
        """The round's segment, made now or found on disk; None when all planned contexts were sampled.

        Raises StoppedError when sampling or scoring cannot go on, and DataError for a round whose files are
        gone.
        """
        try:
            return self._segment(index)
        except (WorkerError, RewardError) as error:
            raise StoppedError(
                f"round {index}: {error}\nthe same command with resume=true goes on with this round"
            ) from error

    def _segment(self, index: int) -> Segment | None:
        inside, lag = self.trainer.progress.position > 0, self.config.rounds.lag
        if index > 0 and not inside:
            self._join()
            self._close(index - 1)
        first = self._first(index)
        if first >= self.contexts.planned or self._left(index) == 0:
            return None
        if not inside:
            self.watch.before_round()
            prefetched = (
                lag and index > 0 and self.engine.run_on_main(lambda: self.round(index).done("groups"))
            )
            if not prefetched:
                weights = self._publish(index, first)
                self.engine.run_on_main(
                    lambda: _required(self.builder).build(self.round(index), first, weights)
                )
        if lag and self._first(index + 1) < self.contexts.planned:
            self._start_prefetch(index + 1, inside)
        self._entered = None if inside else time.monotonic()
        return self._enter(index, inside)

    def _first(self, index: int) -> int:
        """The round's first context, which is where the one before ended."""
        return self.engine.run_on_main(
            lambda: 0 if index == 0 else int(self.round(index - 1).record["contexts"][1])
        )

    def _left(self, index: int) -> int | None:
        """Of ``rounds.examples``, how many are left to train on when the round starts; None where contexts
        alone end the run."""
        if self.config.rounds.examples is None:
            return None
        trained = self.engine.run_on_main(
            lambda: sum(int(self.round(i).record["examples"]) for i in range(index))
        )
        return max(0, self.config.rounds.examples - trained)

    def _start_prefetch(self, index: int, inside: bool) -> None:
        """Sample and score a round beside the training of the one before, from the weights that that one
        starts with. ``inside``: it has started, and they are those that were published then."""
        first, folder = self._first(index), self.round(index)
        weights = (
            str(self.engine.run_on_main(lambda: folder.record["weights"]))
            if inside
            else self._publish(index, first)
        )
        builder = self.builder
        if builder is None:
            return

        def work() -> None:
            if inside and builder.needs_weights(folder, first, weights):
                self.engine.reload_weights(folder.weights, index)
            builder.build(folder, first, weights)

        self._prefetch = Prefetch(work)

    def _join(self) -> None:
        """Wait for the round that is being made ahead, if one is."""
        prefetch, self._prefetch = self._prefetch, None
        self.engine.run_on_main(lambda: None if prefetch is None else prefetch.result())

    def _publish(self, index: int, first: int) -> str:
        """Let the engine sample the round from the policy as it is now, if anything is left to sample;
        returns the weights' fingerprint."""
        folder, builder, step = self.round(index), self.builder, self.trainer.progress.step
        weights = weights_fingerprint(
            (name, local(p.detach())) for name, p in self.trainer.policy.named_parameters()
        )
        published: Facts = {}
        if self.engine.run_on_main(lambda: _required(builder).needs_weights(folder, first, weights)):
            start = time.monotonic()
            published = self.engine.publish(folder.weights, index)
            published["publish_seconds"] = time.monotonic() - start
        begun = {"round": index, "weights": weights, "sampled_step": step, **published}
        self.engine.run_on_main(lambda: folder.note(begun))
        return weights

    def _enter(self, index: int, inside: bool) -> Segment:
        folder = self.round(index)
        examples = make_examples(folder.groups(), self.view, self.renderer)
        record = folder.record
        facts = {"round": index, "sampled_step": record["sampled_step"]}
        metrics = {
            key: record[key] for key in ("publish_seconds", "probe_largest", "probe_mean") if key in record
        } | record["metrics"]
        self.watch.round_started(facts, {} if inside else metrics, [] if inside else samples_table(folder))
        first, end = record["contexts"]
        noted = {"examples": examples.count, "untrainable": examples.dropped}
        if not inside:
            noted["trained_seconds"] = self.watch.trained_seconds()
        self.engine.run_on_main(lambda: folder.note(noted))
        planned, units, left = self.contexts.planned, examples.count, self._left(index)
        if left is not None:
            units, planned = min(examples.count, left), int(self.config.rounds.examples or 0)
            first, end = planned - left, planned - left + units
        return Segment(
            examples.groups,
            self.config.model.batch_size,
            units,
            self.config.seed,
            index=index,
            start=first / planned,
            end=end / planned,
        )

    def _close(self, index: int) -> None:
        """Note what training on the round came to: time, KL, staleness, and what each device had to do."""
        trained, now = self.watch.trained_seconds(), time.monotonic()
        wall = None if self._entered is None else now - self._entered
        self.engine.run_on_main(lambda: self._note_end(index, trained, wall))

    def _note_end(self, index: int, trained: float, wall: float | None) -> None:
        folder = self.round(index)
        record = folder.record
        lines = [line for line in read_metrics(self.folder / "metrics.jsonl") if line.get("round") == index]
        beside = self.round(
            index + self.config.rounds.lag
        ).record  # with a lag, the round after was made meanwhile, if there is one
        made = beside.get("metrics", {})
        seconds = {
            "publish": beside.get("publish_seconds", 0.0),
            "sample": made.get("sample_seconds", 0.0),
            "score": made.get("score_seconds", 0.0),
            "train": trained - record["trained_seconds"],
        }
        kl = [line["kl"] for line in lines if line.get("kl") is not None]
        folder.note(
            {
                "steps": len(lines),
                "kl": fmean(kl) if kl else None,
                "staleness": fmean(line["step"] - record["sampled_step"] for line in lines)
                if lines
                else None,
                "seconds": seconds,
                "train_wall_seconds": wall,
                "idle": idle_shares(self.config, seconds, wall),
            }
        )


def idle_shares(config: Config, seconds: dict[str, float], wall: float | None) -> dict[str, float]:
    """The share of the round's time for which trainer and sampler had nothing to do. The embedded sampler is
    the trainer. ``wall``: from the first step to the next round, None where the run was interrupted
    between."""
    together = seconds["publish"] + (wall or max(seconds["train"], seconds["sample"] + seconds["score"]))
    total = max(together if config.rounds.lag else sum(seconds.values()), 1e-9)
    if not config.sampler.separate:
        return {"trainer": 1 - (seconds["train"] + seconds["sample"]) / total}
    return {"trainer": 1 - seconds["train"] / total, "sampler": 1 - seconds["sample"] / total}


def view_of_rounds(config: Config, view: View) -> View:
    """The trainer's view, keeping groups of equal rewards where ``rounds.zero_variance`` says so."""
    return partial(view, keep_zero_variance=True) if config.rounds.keeps_equal else view  # type: ignore[call-arg]  # GRPO's takes it


def _required(builder: RoundBuilder | None) -> RoundBuilder:
    assert builder is not None, "rank 0 has a builder"
    return builder
