"""One stage of a round on its own, with the rounds' code: sample here, label there, train elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, TypeVar

from huggingface_hub import snapshot_download

from config.checks import StoppedError
from config.schema import Config, require
from config.schema_sampler import SamplerConfig
from config.schema_stages import LabelStage, SampleStage
from data.chat import Renderer, make_renderer
from data.sources import load_splits
from data.types import Prompt
from data.views import prompts_of
from models.distributed import World
from models.loading import load_sharded
from models.policy import check_model, load_tokenizer, resolve_model_path
from rollouts.engines import EmbeddedEngine
from rollouts.files import read_samples, refuse_existing, write_feedback, write_samples
from rollouts.making import score_samples
from rollouts.rewards.base import RewardError
from rollouts.rewards.factory import make_reward
from rollouts.rounds import Sampled
from rollouts.samplers import EmbeddedSampler, Sample, SamplingSettings
from rollouts.setup import usable_prompts
from rollouts.vllm_sampler import VllmSampler

T = TypeVar("T")


def sample(config: Config, stage: SampleStage, world: World) -> None:
    """Sample ``rounds.samples`` answers to the data's prompts and write them to ``stage.out``. Raises ConfigError, DataError."""
    out = Path(stage.out)
    refuse_existing(out, stage.overwrite_out)
    require(stage.format != "alpacaeval" or config.rounds.samples == 1, "rounds.samples", config.rounds.samples,
            "format=alpacaeval takes one answer a prompt: rounds.samples=1")
    check_model(config.model)
    renderer = make_renderer(load_tokenizer(config.model), config.model, config.data)
    train, evaluation = load_splits(config.data)
    every = prompts_of((train if stage.split == "train" else evaluation).groups)[: stage.limit]
    prompts, refused = usable_prompts(every, renderer)
    require(bool(prompts), "data.path", config.data.path, f"has no prompt to sample in split={stage.split}: {dict(refused) or 'none read'}")
    settings = settings_of(config.sampler)
    with opened(config, renderer, world, Path(config.runs_dir) / "logs") as drawer:
        answers = drawer.together(lambda: drawer.sample(prompts, config.rounds.samples, settings, config.seed))
    if world.is_main:
        made = [Sampled(prompt, tuple(s.completion(renderer.tokenizer) for s in samples))
                for prompt, samples in zip(prompts, answers, strict=True)]
        write_samples(out, made, stage.format, config.model.name_or_path, f"{config.data.name}_{stage.split}")
        print(f"{out}: {config.rounds.samples} samples of each of {len(prompts)} prompts"
              + (f"; {refused.total()} prompts cannot be rendered" if refused else ""), flush=True)


class Drawer(Protocol):
    """A sampler with its weights. ``together`` and ``sample`` as of ``rollouts.engines.Engine``."""

    def together(self, work: Callable[[], T]) -> T: ...

    def sample(self, prompts: list[Prompt], n: int, settings: SamplingSettings, seed: int) -> list[list[Sample]]: ...


class _OneProcess:
    """vLLM, whose processes are its own: there is no other rank to help."""

    def __init__(self, sampler: VllmSampler) -> None:
        self.sample = sampler.sample

    def together(self, work: Callable[[], T]) -> T:
        return work()


def settings_of(config: SamplerConfig) -> SamplingSettings:
    return SamplingSettings(config.temperature, config.top_p, config.max_tokens)


@contextmanager
def opened(config: Config, renderer: Renderer, world: World, log_dir: Path) -> Iterator[Drawer]:
    """The sampler that the settings name, with the weights of ``model``; every rank opens it. Raises ConfigError."""
    if config.sampler.name == "vllm":
        require(world.size == 1, "sampler", "vllm", "has processes of its own (sampler.data_parallel): start it without a launcher")
        with VllmSampler(config.sampler, renderer, max_length=config.model.max_length, dtype=config.model.dtype, log_dir=log_dir) as vllm:
            vllm.load(model_folder(config), 0)
            yield _OneProcess(vllm)
        return
    policy, _ = load_sharded(config.model, world)
    rows = config.sampler.batch_size or config.model.eval_batch_size
    yield EmbeddedEngine(EmbeddedSampler(policy, renderer, world.device, batch_size=rows, synced=world.size > 1), world)


def model_folder(config: Config) -> Path:
    """The model's own files, from a run's folder, any folder or the hub."""
    path = Path(resolve_model_path(config.model.name_or_path))
    if path.is_dir():
        return path
    return Path(snapshot_download(config.model.name_or_path, revision=config.model.revision, allow_patterns=["*.json", "*.safetensors"]))


def label(config: Config, stage: LabelStage, device: str) -> None:
    """Score the samples in ``stage.samples`` and write the feedback to ``stage.out``.

    Raises ConfigError, DataError, and StoppedError when too few samples get a score."""
    out = Path(stage.out)
    refuse_existing(out, stage.overwrite_out)
    require(config.reward is not None, "reward", None, "choose a file of config/reward, as in reward=armorm or reward=verifier")
    assert config.reward is not None
    needs_pairs = stage.format == "pairwise"
    require(not needs_pairs or config.rounds.feedback in ("pair", "random"), "rounds.feedback", config.rounds.feedback,
            "format=pairwise takes pair or random")
    samples = read_samples(Path(stage.samples))
    reward = make_reward(config.reward, device)
    try:
        scores = score_samples(reward, samples)
    except RewardError as error:
        raise StoppedError(str(error)) from error
    finally:
        reward.close()
    entries = write_feedback(out, samples, scores, stage.format, config.rounds, config.seed)
    given = sum(score is not None for values in scores for score in values)
    print(f"{out}: {entries} entries from {given} scored samples of {len(samples)} prompts", flush=True)
