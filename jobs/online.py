"""Online training: its plan, made and checked before any weights are loaded, and its rounds as a source of
segments, each sampled from the policy at the round's start.

That is all that online training adds. The trainer pulls a round when the previous one is used up. Optimizer,
schedule and sync phase simply continue, and the reference becomes the policy at the round's start as it does
for any segment.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np

from common.errors import StoppedError, require
from common.progress import phase
from common.worker_process import WorkerError
from config.schema import Config
from data.batches import Segment
from data.chat import Renderer
from data.examples import Examples, make_examples
from data.rows import reasons
from data.types import Example, Group, Prompt, Sequence
from data.views import ExampleSpec, View, prompts_of
from jobs.plan import Plan, check_data, held_out_segment
from jobs.preflight import LoadedData
from jobs.stages import reward_on_ranks
from jobs.watch import RunWatch
from models.distributed import ShareError, World, on_main_alone
from models.fingerprint import weights_fingerprint
from models.policy import Policy
from reports.metrics import read_metrics
from rollouts.inputs import check_contexts
from rollouts.ledger import RoundFolder
from rollouts.rewards.base import Reward, RewardError
from rollouts.round_builder import RoundBuilder, samples_table
from rollouts.rounds import PromptSchedule, replayed, usable_prompts
from rollouts.samplers import Sampler, make_sampler
from trainers.basic import BasicTrainer
from trainers.dealing import Progress

T = TypeVar("T")


def make_online_plan(
    config: Config, trainer: type[BasicTrainer], renderer: Renderer, data: LoadedData
) -> Plan:
    """Return the plan known before the first round: the held-out examples, and the training prompts.

    ``train`` is a placeholder for the rounds: as many examples as they can give at most, each as long as
    allowed. Raises DataError; raises ConfigError if no prompt can be rendered, or if a round has more
    contexts than there are prompts.
    """
    check_data(config, data, renderer)
    loaded, evaluation = data.train, data.evaluation
    prompts, refused = usable_prompts(prompts_of(loaded.groups), renderer)
    rounds, cuts = config.rounds, dict(renderer.cuts)
    check_contexts(config, len(prompts))
    _check_references(config, prompts)
    per_context = examples_per_context(config, trainer)
    row = Sequence(np.zeros(config.model.max_prompt_length, np.int32), np.zeros(config.max_tokens, np.int32))
    batch = (Example("", (row,) * trainer.rows_per_example),) * config.model.batch_size
    held_out = make_examples(evaluation.groups[: config.n_eval_examples], trainer.view_of(config), renderer)
    return Plan(
        train=Segment(
            (batch,), config.model.batch_size, rounds.most_contexts * per_context * rounds.passes, config.seed
        ),
        held_out=held_out_segment(config, held_out),
        loaded=loaded,
        evaluation=evaluation,
        examples=Examples((), dict(refused)),
        cuts=cuts,
        prompts=tuple(prompts),
    )


def examples_per_context(config: Config, trainer: type[BasicTrainer]) -> int:
    """Return the largest number of examples that a context gives."""
    rounds = config.rounds
    return rounds.samples if rounds.feedback in ("threshold", "group") else 2 // trainer.rows_per_example


def longest_round(config: Config, trainer: type[BasicTrainer]) -> int:
    """Return the largest number of steps of a round."""
    each = examples_per_context(config, trainer) * config.rounds.passes
    return math.ceil(config.rounds.contexts_per_round * each / config.model.batch_size)


def _check_references(config: Config, prompts: list[Prompt]) -> None:
    """Raise ConfigError if the reward compares with reference answers, and no prompt has one, or more prompts
    have none than the reward may leave without a verdict."""
    reward, without = config.reward_config, sum(prompt.reference_answer is None for prompt in prompts)
    missing = reward.max_missing if reward.needs_every_reference else 1.0
    most = min(missing * len(prompts), len(prompts) - 1)
    require(
        not reward.needs_reference or without <= most,
        "reward",
        reward.name,
        f"compares with reference answers, and {without} of {len(prompts)} prompts of "
        f"data={config.data.name} have none (reward.max_missing={reward.max_missing:g}): give them one, or "
        "choose another reward",
    )


class Online:
    """The parts that only online training has: prompts, reward, sampler, and the source built from them.

    ``close`` must be called at the end of what ``start`` has begun."""

    def __init__(self, config: Config, plan: Plan, renderer: Renderer, world: World, folder: Path) -> None:
        """``folder``: the run's folder."""
        self.config, self.renderer, self.world, self.folder = config, renderer, world, folder
        self.contexts = PromptSchedule(list(plan.prompts), config.rounds.contexts, config.seed)
        self.reward: Reward | None = None
        self.sampler: Sampler | None = None

    def start(self) -> None:
        """Make the sampler, and the reward with its processes. Every rank calls it. Raises the ConfigError of
        either on every rank."""
        logs = self.folder / "logs"
        self.sampler = make_sampler(self.config, self.renderer, self.world, logs)
        self.reward = reward_on_ranks(self.config.reward_config, self.world, logs, self.contexts.prompts)

    def source(self, trainer: BasicTrainer, policy: Policy, watch: RunWatch) -> OnlineSource:
        """Return the rounds of ``trainer``'s run as a source; ``watch`` saves and logs them."""
        assert self.sampler is not None, "start was called"
        self.sampler.attach(policy, list(self.contexts.prompts))
        if self.reward is not None:
            self.reward.share_over(self.sampler.ranks)
        builder = None
        if self.world.is_main and self.reward is not None:
            parts = (self.config, self.contexts, self.renderer, self.sampler, self.reward)
            builder = RoundBuilder(*parts, watch.saver.between_stages)
        return OnlineSource(self, trainer, builder, watch)

    def describe(self, plan: Plan, unit: str) -> str:
        """Return the plan in a sentence."""
        rounds = self.config.rounds
        size = f"{rounds.contexts_per_round}{' kept' if rounds.fill else ''}"
        return (
            f"{rounds.contexts} contexts in rounds of {size}, {rounds.samples} samples each, of "
            f"{len(self.contexts.prompts)} prompts: "
            f"at most {plan.train.n_examples} {unit}, {plan.steps} steps of {self.config.model.batch_size}"
        )

    def why_nothing(self) -> str:
        """Return why no round gave anything to train on, from the rounds' own counts."""
        whys: Counter[str] = Counter()
        for record in (RoundFolder(path).record for path in (self.folder / "rounds").glob("[0-9]*")):
            whys += Counter(record.get("dropped", {})) + Counter(record.get("untrainable", {}))
        return f"no round gave anything to train on: {reasons(whys) or 'nothing was sampled'}"

    def close(self) -> None:
        """End the processes of the sampler and the reward."""
        if self.sampler is not None:
            self.sampler.close()
        if self.reward is not None:
            self.reward.close()


@on_main_alone
class RoundRecords:
    """The records of a run's rounds (``round.json``). Every rank makes the same calls and gets the same."""

    def __init__(self, config: Config, folder: Path, rounds: Callable[[int], RoundFolder]) -> None:
        """``folder``: the run's folder."""
        self.planned, self.lag = config.rounds.contexts, config.rounds.lag
        self._folder, self._round = folder, rounds

    def check(self, seals: Mapping[str, str], at: Progress) -> None:
        """Raise DataError unless each round that was there before the checkpoint ``at`` is as it was.
        ``seals``: round -> the seal of its record, of rounds that were finished by then."""
        inside = at.position > 0
        there = at.segment + inside + self.lag * (inside or at.segment > 0)
        with phase("compare the rounds with their checksums", "rounds.contexts"):
            for index in range(there):
                if self._first(index) < self.planned:
                    self._round(index).check(seals.get(str(index)))

    def first(self, index: int) -> int:
        """Return the round's first context, which is where the previous round ended; the number of planned
        contexts if that does not exist."""
        return self._first(index)

    def trained(self, index: int) -> int:
        """Return the number of examples that the rounds before ``index`` gave."""
        return sum(int(self._round(i).record["examples"]) for i in range(index))

    def note(self, index: int, facts: dict[str, Any]) -> None:
        """Add ``facts`` to the round's record."""
        self._round(index).note(facts)

    def close(self, index: int) -> str:
        """Record the steps that were trained on the round. Return the seal of the record, which stays as it
        is from now on."""
        folder = self._round(index)
        if "examples" not in folder.record:
            raise folder.not_as_written(folder.path / "round.json", "it is gone")
        lines = read_metrics(self._folder / "metrics.jsonl")
        folder.note({"steps": sum(line.get("round") == index for line in lines)})
        return folder.seal

    def _first(self, index: int) -> int:
        if index == 0:
            return 0
        return int(self._round(index - 1).record.get("contexts", [0, self.planned])[1])


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
        self, online: Online, trainer: BasicTrainer, builder: RoundBuilder | None, watch: RunWatch
    ) -> None:
        """``builder`` is None on ranks above 0."""
        assert online.sampler is not None, "start was called"
        self.config, self.renderer, self.contexts = online.config, online.renderer, online.contexts
        self.trainer, self.sampler, self.builder, self.watch = trainer, online.sampler, builder, watch
        self.folder = online.folder
        self.records = RoundRecords(online.config, online.folder, self.round)
        self.view = view_of_rounds(online.config, trainer.view_of(online.config))
        self._kept: dict[int, list[str]] = {}
        self.records.check(watch.log.state.rounds, trainer.progress)

    def round(self, index: int) -> RoundFolder:
        """Return the files of round ``index`` of this run."""
        path, run = self.folder / "rounds" / f"{index:03d}", self.watch.saver.inputs["run"]
        return RoundFolder(path, self.config.rounds.compress, run)

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
                arguments = (self.round(index), first, wanted, weights)
                self._with_builder(lambda builder: builder.build(*arguments))

    def _with_builder(self, work: Callable[[RoundBuilder], T]) -> T:
        """Return what the ``work`` gives that rank 0 does with its builder. Where it fails, the run saves and
        ends on every rank."""

        def tried() -> T | None:
            try:
                return work(cast(RoundBuilder, self.builder))
            except Exception as error:
                self.watch.saver.stop_with(error)
                return None

        result = self.sampler.ranks.on_main(tried)
        self.watch.saver.stop_if_requested()
        return cast(T, result)

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
        folder, step = self.round(index), self.trainer.progress.step
        weights = weights_fingerprint(self.trainer.policy.named_parameters())
        published: dict[str, Any] = {}
        wanted = self.config.rounds.sampled(index)
        if self._with_builder(lambda builder: builder.needs_weights(folder, first, wanted, weights)):
            start = time.monotonic()
            with phase(f"round {index}: weights to the sampler, its start", "sampler"):
                published = self.sampler.publish(folder.weights, index, self.config.rounds.keep_weights)
            published["publish_seconds"] = time.monotonic() - start
        self.records.note(index, {"round": index, "weights": weights, "sampled_step": step, **published})
        return weights

    def _enter(self, index: int, inside: bool) -> Segment:
        folder = self.round(index)
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
