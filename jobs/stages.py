"""Run one stage of a round on its own, so that sampling, labelling and training can happen on different
machines."""

from __future__ import annotations

from pathlib import Path

from common.errors import StoppedError, require
from config.schema import Config
from config.schema_stages import LabelStage, SampleStage
from data.chat import make_renderer
from data.sources import load_splits
from data.views import prompts_of
from models.distributed import World
from models.pretrained import check_model, load_tokenizer
from rollouts.files import read_samples, refuse_existing, write_feedback, write_samples
from rollouts.generate import Request, generate_answers, settings_of
from rollouts.rewards.base import RewardError
from rollouts.rewards.factory import make_reward
from rollouts.round_builder import score_samples
from rollouts.rounds import SampledPrompt, usable_prompts


def sample(config: Config, stage: SampleStage, world: World) -> None:
    """Sample ``rounds.samples`` answers to each of the data's prompts and write them to ``stage.out``.

    Raises ConfigError, DataError."""
    out = Path(stage.out)
    refuse_existing(out, stage.overwrite_out)
    require(
        stage.format != "alpacaeval" or config.rounds.samples == 1,
        "rounds.samples",
        config.rounds.samples,
        "format=alpacaeval takes one answer a prompt: rounds.samples=1",
    )
    check_model(config.model)
    renderer = make_renderer(load_tokenizer(config.model), config.model, config.data)
    train, evaluation = load_splits(config.data)
    every = prompts_of((train if stage.split == "train" else evaluation).groups)[: stage.limit]
    prompts, refused = usable_prompts(every, renderer)
    require(
        bool(prompts),
        "data.path",
        config.data.path,
        f"has no prompt to sample in split={stage.split}: {dict(refused) or 'none read'}",
    )
    request = Request(f"{config.rounds.samples} samples each", config.rounds.samples, settings_of(config))
    (drawn,) = generate_answers(
        config, renderer, prompts, [request], world, Path(config.runs_dir) / "logs", out.name
    )
    if world.is_main:
        at = config.model.logit_temperature
        made = [
            SampledPrompt(prompt, tuple(s.completion(renderer, at) for s in samples))
            for prompt, samples in zip(prompts, drawn, strict=True)
        ]
        write_samples(out, made, stage.format, config.model.name_or_path, f"{config.data.name}_{stage.split}")
        print(
            f"{out}: {config.rounds.samples} samples of each of {len(prompts)} prompts"
            + (f"; {refused.total()} prompts cannot be rendered" if refused else ""),
            flush=True,
        )


def label(config: Config, stage: LabelStage, device: str) -> None:
    """Score the samples in ``stage.samples`` and write the feedback to ``stage.out``.

    Raises ConfigError, DataError, and StoppedError when too few samples get a score."""
    out = Path(stage.out)
    refuse_existing(out, stage.overwrite_out)
    require(
        config.reward is not None,
        "reward",
        None,
        "choose a file of config/reward, as in reward=armorm or reward=verifier",
    )
    needs_pairs = stage.format == "pairwise"
    require(
        not needs_pairs or config.rounds.feedback in ("pair", "random"),
        "rounds.feedback",
        config.rounds.feedback,
        "format=pairwise takes pair or random",
    )
    reward = make_reward(config.reward_config, device, Path(config.runs_dir) / "logs")
    try:
        require(
            not reward.gives_tokens,
            "reward",
            config.reward_config.name,
            "rewards the tokens of a run's own rounds, and a file has one score a text: choose another",
        )
        samples = read_samples(Path(stage.samples))
        scores = score_samples(reward, samples)
    except RewardError as error:
        raise StoppedError(str(error)) from error
    finally:
        reward.close()
    entries = write_feedback(out, samples, scores, stage.format, config.rounds, config.seed)
    given = sum(score is not None for values in scores for score in values)
    print(f"{out}: {entries} entries from {given} scored samples of {len(samples)} prompts", flush=True)
