"""Online training as a source of segments, one per round, each sampled from the policy at the round's start.

That is all that online training adds. The trainer pulls a round when the previous one is used up. Optimizer,
schedule and sync phase simply continue, and the reference becomes the policy at the round's start as it does
for any segment.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
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
from jobs.run_folder import run_id
from jobs.watch import RunWatch
from models.distributed import ShareError, on_main
from models.fingerprint import weights_fingerprint
from reports.metrics import read_metrics
from rollouts.ledger import RoundFolder
from rollouts.rewards.base import RewardError
from rollouts.round_builder import RoundBuilder, samples_table
from rollouts.rounds import PromptSchedule, replayed
from rollouts.samplers import Sampler
from trainers.basic import BasicTrainer
from trainers.dealing import Progress


class RoundRecords:
    """The records of the rounds of the run in ``folder``. Every rank makes the same calls and gets the same:
    rank 0 alone reads and writes ``round.json``."""

    def __init__(self, folder: Path, config: Config) -> None:
        self.folder, self.config, self.run = folder, config, on_main(lambda: run_id(folder))

    def round(self, index: int) -> RoundFolder:
        path, compress = self.folder / "rounds" / f"{index:03d}", self.config.rounds.compress
        return RoundFolder(path, compress, self.run)

    def check(self, seals: Mapping[str, str], at: Progress) -> None:
        """Raise DataError unless each round that was there before the checkpoint ``at`` is as it was.
        ``seals``: round -> the seal of its record, of rounds that were finished by then."""
        inside = at.position > 0
        there = at.segment + inside + self.config.rounds.lag * (inside or at.segment > 0)
        with phase("compare the rounds with their checksums", "rounds.contexts"):
            for index in range(there):
                if self.first(index) < self.config.rounds.contexts:
                    on_main(partial(self.round(index).check, seals.get(str(index))))

    def first(self, index: int) -> int:
        """Return the round's first context, which is where the previous round ended; the number of planned
        contexts if that does not exist."""
        if index == 0:
            return 0
        planned = self.config.rounds.contexts
        return on_main(lambda: int(self.round(index - 1).record.get("contexts", [0, planned])[1]))

    def trained(self, index: int) -> int:
        """Return the number of examples that the rounds before ``index`` gave."""
        return on_main(lambda: sum(int(self.round(i).record["examples"]) for i in range(index)))

    def note(self, index: int, facts: dict[str, Any]) -> None:
        """Add ``facts`` to the round's record."""
        on_main(lambda: self.round(index).note(facts))

    def close(self, index: int) -> str:
        """Record the steps that were trained on the round. Return the seal of the record, which stays as it
        is from now on."""
        return on_main(lambda: self._closed(index))

    def _closed(self, index: int) -> str:
        own = self.round(index)
        if "examples" not in own.record:
            raise own.not_as_written(own.path / "round.json", "it is gone")
        lines = read_metrics(self.folder / "metrics.jsonl")
        own.note({"steps": sum(line.get("round") == index for line in lines)})
        return own.seal


@contextmanager
def stopping(index: int) -> Iterator[None]:
    """Raise StoppedError, which says what to do, where round ``index`` cannot be sampled or scored."""
    try:
        yield
    except (WorkerError, RewardError, ShareError) as error:
        goes_on = "the same command with resume=true goes on with this round"
        if isinstance(error, RewardError):
            goes_on += ", and says what accepts changed code; changed settings need a new run (exp_name)"
        raise StoppedError(f"round {index}: {error}\n{goes_on}") from error


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
        self.sampler, self.builder, self.watch = sampler, builder, watch
        self.records = RoundRecords(folder, config)
        self.view = view_of_rounds(config, trainer.view_of(config))
        self._kept: dict[int, list[str]] = {}
        self.records.check(watch.log.state.rounds, trainer.progress)

    def segment(self, index: int) -> Segment | None:
        """Return the round's segment, made now or found on disk; None when all planned contexts were sampled.

        Raises StoppedError when sampling or scoring cannot continue, and DataError for a round whose files
        are missing.
        """
        with stopping(index):
            inside = self.trainer.progress.position > 0
            if not inside:
                self.watch.before_round()
            if index > 0 and not inside:
                self.watch.log.flush()
                self.watch.log.state.rounds[str(index - 1)] = self.records.close(index - 1)
            if self.records.first(index) >= self.contexts.planned or self._left(index) == 0:
                return None
            if not inside:
                ahead = index + self.config.rounds.lag
                for due in range(0 if index == 0 else ahead, ahead + 1):  # those that come from these weights
                    if self.records.first(due) < self.contexts.planned:
                        self._make(due)
            return self._enter(index, inside)

    def _make(self, index: int) -> None:
        first, wanted = self.records.first(index), self.config.rounds.sampled(index)
        with stopping(index):
            weights = self._publish(index, first)
            with phase(f"round {index}", "rounds.contexts_per_round"):
                arguments = (self.records.round(index), first, wanted, weights)
                self._on_main(lambda: cast(RoundBuilder, self.builder).build(*arguments))

    def _on_main(self, work: Callable[[], None]) -> None:
        """Do the ``work`` of a round on rank 0. Where it fails, the run saves and ends on every rank."""

        def tried() -> None:
            try:
                work()
            except Exception as error:
                self.watch.saver.stop_with(error)

        self.sampler.ranks.on_main(tried)
        self.watch.saver.stop_if_requested()

    def _left(self, index: int) -> int | None:
        """Return how many of ``rounds.examples`` are left to train on when the round starts.

        None where only the contexts limit the run."""
        if self.config.rounds.examples is None:
            return None
        trained = self.records.trained(index) * self.config.rounds.passes
        return max(0, self.config.rounds.examples - trained)

    def _publish(self, index: int, first: int) -> str:
        """Return the fingerprint of the policy's current weights, which go to the engine if anything of the
        round is left to sample."""
        folder, builder, step = self.records.round(index), self.builder, self.trainer.progress.step
        weights = weights_fingerprint(self.trainer.policy.named_parameters())
        published: dict[str, Any] = {}
        wanted = self.config.rounds.sampled(index)
        if on_main(lambda: cast(RoundBuilder, builder).needs_weights(folder, first, wanted, weights)):
            start = time.monotonic()
            with phase(f"round {index}: weights to the sampler, its start", "sampler"):
                published = self.sampler.publish(folder.weights, index, self.config.rounds.keep_weights)
            published["publish_seconds"] = time.monotonic() - start
        self.records.note(index, {"round": index, "weights": weights, "sampled_step": step, **published})
        return weights

    def _enter(self, index: int, inside: bool) -> Segment:
        folder = self.records.round(index)
        parts = self._examples(index)
        groups = tuple(group for part in parts for group in part.groups)
        record = folder.record
        measured = ("publish_seconds", "probe_largest", "probe_mean")
        about = {key: record[key] for key in measured if key in record}
        new = ({}, []) if inside else (about | record["metrics"], samples_table(folder))
        self.watch.log.round_started(index, *new)
        first, end = record["contexts"]
        count = sum(part.count for part in parts)
        noted = {"examples": count, "replayed": count - parts[-1].count, "untrainable": parts[-1].dropped}
        self.records.note(index, noted)
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
                groups = [group for group in self.records.round(i).groups() if group.prompt.id in prompts]
                by_source.append(self._round_examples(i, groups))
        return [*by_source, self._round_examples(index, self.records.round(index).groups())]

    def _kept_prompts(self, index: int) -> list[str]:
        """Return the prompt ids of the contexts that round ``index`` kept.

        The round's groups are read for this once per process."""
        if index not in self._kept:
            self._kept[index] = list(
                dict.fromkeys(group.prompt.id for group in self.records.round(index).groups())
            )
        return self._kept[index]

    def _round_examples(self, index: int, groups: list[Group]) -> Examples:
        """Return the examples of groups of round ``index``, with the step at which they were sampled."""
        examples = make_examples(groups, self.view, self.renderer)
        step = self.records.round(index).record["sampled_step"]
        sampled = [tuple(replace(e, sampled_step=step) for e in group) for group in examples.groups]
        return replace(examples, groups=sampled)


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
