"""Build the parts of online training from a typed config, and refuse bad settings before any weights are
loaded."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import numpy as np

from common.errors import require
from config.schema import Config
from data.batches import Segment
from data.chat import Renderer
from data.examples import Examples, make_examples
from data.types import Example, Prompt, Sequence
from data.views import prompts_of
from jobs.online_source import OnlineSource
from jobs.plan import Plan, check_data, held_out_segment
from jobs.preflight import LoadedData
from jobs.stages import reward_on_ranks
from jobs.watch import RunWatch
from models.distributed import World, on_main
from models.policy import Policy
from rollouts.inputs import check_contexts
from rollouts.ledger import RoundFolder
from rollouts.rewards.base import Reward
from rollouts.round_builder import RoundBuilder
from rollouts.rounds import PromptSchedule, usable_prompts
from rollouts.samplers import Sampler, make_sampler
from trainers.basic import BasicTrainer


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
    prompts, reasons = usable_prompts(prompts_of(loaded.groups), renderer)
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
        examples=Examples((), dict(reasons)),
        cuts=cuts,
        prompts=tuple(prompts),
    )


def examples_per_context(config: Config, trainer: type[BasicTrainer]) -> int:
    """Return the largest number of examples that a context gives."""
    rounds = config.rounds
    return rounds.samples if rounds.feedback in ("threshold", "group") else 2 // trainer.rows_per_example


def round_steps(config: Config, trainer: type[BasicTrainer]) -> tuple[list[int], bool]:
    """Return (the largest number of steps of each round, whether these numbers are exact).

    Exact numbers still shrink if samples get no verdict."""
    rounds, left = config.rounds, config.rounds.contexts
    contexts: list[int] = []
    while left > 0:
        sampled = min(left, rounds.sampled(len(contexts)))
        contexts.append(sampled + rounds.replayed(len(contexts)))
        left -= sampled
    each = examples_per_context(config, trainer) * rounds.passes
    keeps_all = rounds.fill or rounds.feedback == "threshold" or rounds.keeps_equal
    steps = [math.ceil(count * each / config.model.batch_size) for count in contexts]
    return steps, keeps_all and rounds.examples is None


def _check_references(config: Config, prompts: list[Prompt]) -> None:
    """Raise ConfigError if the reward compares with reference answers, and no prompt has one, or more prompts
    have none than the reward may leave without a verdict."""
    reward, data = config.reward_config, config.data.name
    without = sum(prompt.reference_answer is None for prompt in prompts)
    require(
        not reward.needs_reference or without < len(prompts),
        "reward",
        reward.name,
        f"compares with reference answers, of which data={data} has none; choose another, as in "
        "reward=armorm",
    )
    require(
        not reward.needs_every_reference or without <= reward.max_missing * len(prompts),
        "reward",
        reward.name,
        f"compares with reference answers, and {without} of {len(prompts)} prompts of data={data} have none, "
        f"more than reward.max_missing={reward.max_missing:g}: give them one or leave them out",
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
        reward = self.reward = reward_on_ranks(self.config.reward_config, self.world, logs)
        on_main(lambda: None if reward is None else reward.check_prompts(self.contexts.prompts))

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
        return OnlineSource(
            self.config, trainer, self.renderer, self.contexts, self.sampler, builder, self.folder, watch
        )

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
        """Return a clause that says why no round gave anything to train on, from the rounds' own counts."""
        records = [RoundFolder(path).record for path in sorted((self.folder / "rounds").glob("[0-9]*"))]
        whys: Counter[str] = Counter()
        for record in records:
            whys += Counter(record.get("dropped", {})) + Counter(record.get("untrainable", {}))
        reasons = "; ".join(f"{count} prompts: {why}" for why, count in whys.most_common())
        return (
            f", as none of {len(records)} rounds gave anything to train on "
            f"({reasons or 'nothing was sampled'})"
        )

    def close(self) -> None:
        """End the processes of the sampler and the reward."""
        if self.sampler is not None:
            self.sampler.close()
        if self.reward is not None:
            self.reward.close()
