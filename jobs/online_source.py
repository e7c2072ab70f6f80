"""Online training as a source of segments, one per round, each sampled from the policy at the round's start.

That is all that online training adds. The trainer pulls a round when the previous one is used up. Optimizer,
schedule and sync phase simply continue, and the reference becomes the policy at the round's start as it does
for any segment.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, cast

from common.errors import StoppedError
from common.progress import phase
from common.worker_process import WorkerError
from config.schema import Config
from data.batches import Segment
from data.chat import Renderer
from data.examples import Examples, make_examples
from data.types import Group
from data.views import ExampleSpec, View
from jobs.same_data import reward_code
from jobs.watch import RunWatch
from models.distributed import ShareError, ended_together, on_main
from models.fingerprint import weights_fingerprint
from reports.metrics import read_metrics
from rollouts.ledger import RoundFolder
from rollouts.rewards.base import RewardError
from rollouts.round_builder import RoundBuilder, samples_table
from rollouts.rounds import PromptSchedule, replayed
from rollouts.samplers import Sampler
from trainers.basic import BasicTrainer

Facts = dict[str, Any]


class OnlineSource:
    """The rounds of a run (a ``trainers.basic.SegmentSource``).

    Every rank has an instance and makes the same calls; rank 0's ``builder`` makes the rounds."""

    def __init__(
        self,
        config: Config,
        trainer: BasicTrainer,
        renderer: Renderer,
        contexts: PromptSchedule,
        sampler: Sampler,
        builder: RoundBuilder | None,
        folder: Path,
        watch: RunWatch,
    ) -> None:
        """``builder`` is None on ranks above 0; ``folder`` is the run's."""
        self.config, self.trainer, self.renderer, self.contexts = config, trainer, renderer, contexts
        self.sampler, self.builder, self.folder, self.watch = sampler, builder, folder, watch
        self.view = view_of_rounds(config, trainer.view_of(config))
        self._entered: float | None = None
        self._kept: dict[int, list[str]] = {}

    def round(self, index: int) -> RoundFolder:
        return RoundFolder(self.folder / "rounds" / f"{index:03d}", self.config.rounds.compress)

    def segment(self, index: int) -> Segment | None:
        """Return the round's segment, made now or found on disk; None when all planned contexts were sampled.

        Raises StoppedError when sampling or scoring cannot continue, and DataError for a round whose files
        are missing.
        """
        with stopping(index, self.config):
            return self._segment(index)

    def _segment(self, index: int) -> Segment | None:
        inside = self.trainer.progress.position > 0
        if not inside:
            self.watch.before_round()
        if index > 0 and not inside:
            self._close(index - 1)
        if self._first(index) >= self.contexts.planned or self._left(index) == 0:
            return None
        if not inside:
            ahead = index + self.config.rounds.lag
            for due in range(0 if index == 0 else ahead, ahead + 1):  # those that come from these weights
                if self._first(due) < self.contexts.planned:
                    self._make(due)
        self._entered = None if inside else time.monotonic()
        return self._enter(index, inside)

    def _make(self, index: int) -> None:
        first, wanted = self._first(index), self.config.rounds.sampled(index)
        with stopping(index, self.config):
            weights = self._publish(index, first)
            with phase(f"round {index}", "rounds.contexts_per_round"):
                self._on_main(
                    lambda: cast(RoundBuilder, self.builder).build(self.round(index), first, wanted, weights)
                )

    def _on_main(self, work: Callable[[], None]) -> None:
        """Do the ``work`` of a round on rank 0. Where it fails, the run saves and ends on every rank."""

        def tried() -> None:
            try:
                work()
            except Exception as error:
                self.watch.saver.stop_with(error)

        self.sampler.ranks.on_main(tried)
        self.watch.saver.stop_if_requested()

    def _first(self, index: int) -> int:
        """Return the round's first context, which is where the previous round ended.

        If the previous round does not exist, the result is the number of planned contexts."""
        behind = [0, self.contexts.planned]
        return on_main(
            lambda: 0 if index == 0 else int(self.round(index - 1).record.get("contexts", behind)[1])
        )

    def _left(self, index: int) -> int | None:
        """Return how many of ``rounds.examples`` are left to train on when the round starts.

        None where only the contexts limit the run."""
        if self.config.rounds.examples is None:
            return None
        trained = on_main(lambda: sum(int(self.round(i).record["examples"]) for i in range(index)))
        trained *= self.config.rounds.passes
        return max(0, self.config.rounds.examples - trained)

    def _publish(self, index: int, first: int) -> str:
        """Publish the policy's current weights to the engine if anything of the round is left to sample.

        Returns the weights' fingerprint."""
        folder, builder, step = self.round(index), self.builder, self.trainer.progress.step
        with ended_together():
            weights = weights_fingerprint(self.trainer.policy.named_parameters())
        published: Facts = {}
        wanted = self.config.rounds.sampled(index)
        if on_main(lambda: cast(RoundBuilder, builder).needs_weights(folder, first, wanted, weights)):
            start = time.monotonic()
            with phase(f"round {index}: weights to the sampler, its start", "sampler"):
                published = self.sampler.publish(folder.weights, index, self.config.rounds.keep_weights)
            published["publish_seconds"] = time.monotonic() - start
        begun = {"round": index, "weights": weights, "sampled_step": step, **published}
        on_main(lambda: folder.note(begun))
        return weights

    def _enter(self, index: int, inside: bool) -> Segment:
        folder = self.round(index)
        parts = self._examples(index)
        groups = tuple(group for part in parts for group in part.groups)
        record = folder.record
        facts = {"round": index}
        metrics = {
            key: record[key] for key in ("publish_seconds", "probe_largest", "probe_mean") if key in record
        } | record["metrics"]
        self.watch.log.round_started(
            facts, {} if inside else metrics, [] if inside else samples_table(folder)
        )
        first, end = record["contexts"]
        count = sum(part.count for part in parts)
        noted = {"examples": count, "replayed": count - parts[-1].count, "untrainable": parts[-1].dropped}
        if not inside:
            noted["trained_seconds"] = self.watch.log.trained_seconds()
        on_main(lambda: folder.note(noted))
        planned, units, left = self.contexts.planned, count * self.config.rounds.passes, self._left(index)
        if left is not None:
            units, planned = min(units, left), int(self.config.rounds.examples or 0)
            first, end = planned - left, planned - left + units
        segment = Segment(
            groups,
            self.config.model.batch_size,
            units,
            self.config.seed,
            index=index,
            start=first / planned,
            end=end / planned,
        )
        self.watch.log.round_planned(segment)
        return segment

    def _examples(self, index: int) -> list[Examples]:
        """Return the round's training examples by source: earlier rounds that are replayed, then itself."""
        earlier = [self._kept_prompts(i) for i in range(index if self.config.rounds.replay else 0)]
        by_source = []
        chosen = replayed(earlier, self.config.rounds.replayed(index), index, self.config.seed)
        for i, prompts in enumerate(map(set, chosen)):
            if prompts:
                groups = [group for group in self.round(i).groups() if group.prompt.id in prompts]
                by_source.append(self._round_examples(i, groups))
        return [*by_source, self._round_examples(index, self.round(index).groups())]

    def _kept_prompts(self, index: int) -> list[str]:
        """Return the prompt ids of the contexts that round ``index`` kept.

        The round's groups are read for this once per process."""
        if index not in self._kept:
            self._kept[index] = list(dict.fromkeys(group.prompt.id for group in self.round(index).groups()))
        return self._kept[index]

    def _round_examples(self, index: int, groups: list[Group]) -> Examples:
        """Return the examples of groups of round ``index``, with the step at which they were sampled."""
        examples = make_examples(groups, self.view, self.renderer)
        step = self.round(index).record["sampled_step"]
        sampled = [tuple(replace(e, sampled_step=step) for e in group) for group in examples.groups]
        return replace(examples, groups=sampled)

    def _close(self, index: int) -> None:
        """Record the outcome of training on the round: time, KL, staleness, and the devices' idle shares."""
        trained, now = self.watch.log.trained_seconds(), time.monotonic()
        wall = None if self._entered is None else now - self._entered
        on_main(lambda: self._note_end(index, trained, wall))

    def _note_end(self, index: int, trained: float, wall: float | None) -> None:
        folder = self.round(index)
        record = folder.record
        lines = [line for line in read_metrics(self.folder / "metrics.jsonl") if line.get("round") == index]
        before = self.round(index + self.config.rounds.lag).record  # the round that was made before it
        metrics = before.get("metrics", {})
        seconds = {
            "publish": before.get("publish_seconds", 0.0),
            "sample": metrics.get("sample_seconds", 0.0),
            "score": metrics.get("score_seconds", 0.0),
            "train": trained - record["trained_seconds"],
        }
        # The seconds follow each other; an embedded sampler counts as the trainer.
        total, train, sample = max(sum(seconds.values()), 1e-9), seconds["train"], seconds["sample"]
        idle = {"trainer": 1 - (train + sample) / total}
        if self.config.sampler.separate:
            idle = {"trainer": 1 - train / total, "sampler": 1 - sample / total}
        kl = [line["kl"] for line in lines if line.get("kl") is not None]
        folder.note(
            {
                "steps": len(lines),
                "kl": fmean(kl) if kl else None,
                "staleness": fmean(line["staleness"] for line in lines) if lines else None,
                "seconds": seconds,
                "train_wall_seconds": wall,
                "idle": idle,
            }
        )


@contextmanager
def stopping(index: int, config: Config) -> Iterator[None]:
    """Raise StoppedError, which says what to do, where round ``index`` cannot be sampled or scored."""
    try:
        yield
    except (WorkerError, RewardError, ShareError) as error:
        goes_on = "the same command with resume=true goes on with this round"
        if isinstance(error, RewardError):
            code = ",".join(reward_code(config))
            goes_on += f", once the reward's code is changed with 'resume_with_other=[{code}]'" * bool(code)
            goes_on += "; changed settings need a new run (exp_name)"
        raise StoppedError(f"round {index}: {error}\n{goes_on}") from error


def view_of_rounds(config: Config, view: View) -> View:
    """Return the trainer's view, which keeps groups of equal rewards if ``rounds.zero_variance`` says so, and
    leaves out samples that were cut, once they have counted in their group's advantages, with
    ``rounds.truncated=mask``."""
    view = partial(view, keep_zero_variance=True) if config.rounds.keeps_equal else view  # type: ignore[call-arg]  # GRPO's takes it
    return partial(finished_alone, view) if config.rounds.truncated == "mask" else view


def finished_alone(view: View, group: Group) -> list[ExampleSpec]:
    """Return the examples of ``view`` whose completions all ended by themselves (DAPO's overlong filtering,
    Yu et al. 2025, arXiv 2503.14476)."""
    return [want for want in view(group) if all(group.completions[i].finished for i in want.completions)]
