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
from data.rows import reasons
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
