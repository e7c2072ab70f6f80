"""Run one stage of a round on its own, so that sampling, labelling and training can happen on different
machines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from transformers.utils.logging import disable_progress_bar

from common.errors import ConfigError, DataError, StoppedError, require
from config.schema import Config
from config.schema_rewards import RewardConfig
from config.schema_stages import LabelStage, SampleStage
from data.chat import make_renderer
from data.quality import limit_tokens
from data.sources import load_splits
from data.types import Prompt
from data.views import prompts_of
from models.distributed import Ranks, World, on_every_rank
from models.pretrained import check_model, load_tokenizer
from rollouts.answers import Request, generate_answers
from rollouts.files import read_samples, write_feedback, write_samples
from rollouts.rewards.base import Reward, RewardError, make_reward
from rollouts.round_builder import score_samples
from rollouts.rounds import SampledPrompt, usable_prompts
from rollouts.samplers import SamplingSettings


def sample(config: Config, stage: SampleStage, world: World) -> None:
    """Sample ``rounds.samples`` answers to each of the data's prompts and write them to ``stage.out``.

    Raises ConfigError, DataError."""
    out = Path(stage.out)
    disable_progress_bar()  # transformers draws a bar for every file
    hf_config = check_model(config.model)
    renderer = make_renderer(load_tokenizer(config.model), config.model, config.data)
    limit_tokens(renderer.tokenizer, hf_config.get_text_config().vocab_size, renderer.stop_token_ids)
    train, evaluation = load_splits(config.data)
    every = prompts_of((train if stage.split == "train" else evaluation).groups)[stage.skip :][: stage.limit]
    require(bool(every) or not stage.skip, "skip", stage.skip, f"leaves no prompt in split={stage.split}")
    prompts, refused = usable_prompts(every, renderer)
    require(
        bool(prompts),
        "data.path",
        config.data.path,
        f"has no prompt to sample in split={stage.split}: {dict(refused) or 'none read'}",
    )
    n, settings = config.rounds.samples, SamplingSettings.from_config(config)
    request = Request(f"{n} samples each", n, settings)
    (drawn,) = generate_answers(
        config, renderer, prompts, [request], world, Path(config.runs_dir) / "logs", out.name
    )
    if world.is_main:
        at = config.model.logit_temperature
        sampled = [
            SampledPrompt(prompt, tuple(s.completion(renderer, at) for s in samples))
            for prompt, samples in zip(prompts, drawn, strict=True)
        ]
        write_samples(
            out, sampled, stage.format, config.model.name_or_path, f"{config.data.name}_{stage.split}"
        )
        print(
            f"{out}: {config.rounds.samples} samples of each of {len(prompts)} prompts"
            + (f"; {refused.total()} prompts cannot be rendered" if refused else ""),
            flush=True,
        )


def label(config: Config, stage: LabelStage, world: World) -> None:
    """Score the samples in ``stage.samples`` and write the feedback to ``stage.out``. Every rank calls it
    and scores a share with the reward's models; rank 0 does the rest.

    Raises ConfigError, DataError, and StoppedError when too few samples get a score or a rank fails."""
    ranks, logs = Ranks(), Path(config.runs_dir) / "logs"
    reward = reward_on_ranks(config.reward_config, world, logs)
    if reward is not None:
        reward.share_over(ranks)
    try:
        ranks.on_main(lambda: _label(config, stage, reward))
    finally:
        if reward is not None:
            reward.close()


def reward_on_ranks(
    settings: RewardConfig, world: World, logs: Path, prompts: Sequence[Prompt] = ()
) -> Reward | None:
    """Return the reward on rank 0, which checks the ``prompts`` that it will score, and its models alone on
    the others, which score a share; None on those if it has none. Raises on every rank what any of them
    raises."""
    built: list[Reward] = []

    def make() -> None:
        needed = settings if world.is_main else settings.models_alone()
        if needed is not None:
            built.append(make_reward(needed, world.device, logs if world.is_main else None))
            if world.is_main and prompts:
                built[0].check_prompts(prompts)

    try:
        on_every_rank(make)
    except BaseException:
        for reward in built:
            reward.close()
        raise
    return built[0] if built else None


def _label(config: Config, stage: LabelStage, reward: Reward | None) -> None:
    assert reward is not None, "rank 0 has the whole reward"
    out = Path(stage.out)
    try:
        samples = read_samples(Path(stage.samples))
        if not samples:
            raise DataError(f"{stage.samples}: holds no sample; in= takes the files that sample.py writes")
        reward.check_prompts([one.prompt for one in samples])
        scores = score_samples(reward, samples)
        parts = {name: value for name, value in reward.metrics.items() if name.startswith("reward_")}
    except RewardError as error:
        raise StoppedError(str(error)) from error
    entries = write_feedback(out, samples, scores, stage.format, config.rounds, config.seed)
    n_scored = sum(score is not None for values in scores for score in values)
    summary = f"{n_scored} scored samples of {len(samples)} prompts"
    if not entries:
        why = f"leaves nothing of {summary}: look at the reward; format=scalar keeps every score"
        raise ConfigError("rounds.feedback", config.rounds.feedback, why)
    means = "".join(f"; {name} {value:.3f}" for name, value in parts.items())
    print(f"{out}: {entries} entries from {summary}{means}", flush=True)
