"""Answers of a model to many prompts, outside of a run's rounds: for the stages and for evaluation. What is
drawn is kept as it comes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import torch
from huggingface_hub import snapshot_download

from common.errors import require
from common.files import files_digest
from config.schema import Config
from data.chat import Renderer
from data.types import Prompt
from models.distributed import World, on_main
from models.loading import load_sharded
from models.pretrained import resolve_model_path
from reports.progress import progress
from rollouts.answer_cache import AnswerCache
from rollouts.engines import EmbeddedEngine
from rollouts.samplers import EmbeddedSampler, Sample, SamplingSettings
from rollouts.vllm_sampler import VllmSampler

T = TypeVar("T")

_VLLM_PARTS, _VLLM_IN_FLIGHT = 20, 512
"""vLLM is asked in so many parts, so that there is something to show and to keep, but for at least so many
samples at once."""


@dataclass(frozen=True)
class Request:
    """``n`` answers to every prompt."""

    what: str
    """said by the progress bar"""
    n: int
    settings: SamplingSettings


class OpenSampler(Protocol):
    """A sampler with its weights. ``run_on_main`` and ``sample`` as of ``rollouts.engines.Engine``."""

    def run_on_main(self, work: Callable[[], T]) -> T: ...

    def sample(
        self, prompts: list[Prompt], n: int, settings: SamplingSettings, seed: int
    ) -> list[list[Sample]]: ...


class _OneProcess:
    """vLLM, whose processes are its own: there is no other rank to help."""

    def __init__(self, sampler: VllmSampler) -> None:
        self.sample = sampler.sample

    def run_on_main(self, work: Callable[[], T]) -> T:
        return work()


def settings_of(config: Config) -> SamplingSettings:
    """How answers are drawn with the settings of a run."""
    return SamplingSettings(config.sampler.temperature, config.sampler.top_p, config.max_tokens)


@contextmanager
def open_sampler(config: Config, renderer: Renderer, world: World, log_dir: Path) -> Iterator[OpenSampler]:
    """The sampler that the settings name, with the weights of ``model``; every rank opens it. Raises
    ConfigError."""
    if config.sampler.name == "vllm":
        require(
            world.size == 1,
            "sampler",
            "vllm",
            "has processes of its own (sampler.data_parallel): start it without a launcher",
        )
        with VllmSampler(
            config.sampler,
            renderer,
            max_length=config.model.max_length,
            dtype=config.model.dtype,
            log_dir=log_dir,
        ) as vllm:
            vllm.load(model_folder(config), 0)
            yield _OneProcess(vllm)
        return
    policy, _ = load_sharded(config.model, world)
    rows = config.sampler.batch_size or config.model.eval_batch_size
    yield EmbeddedEngine(
        EmbeddedSampler(policy, renderer, world.device, batch_size=rows, synced=world.size > 1), world
    )


def model_folder(config: Config) -> Path:
    """The model's own files, from a run's folder, any folder or the hub."""
    path = Path(resolve_model_path(config.model.name_or_path))
    if path.is_dir():
        return path
    return Path(
        snapshot_download(
            config.model.name_or_path,
            revision=config.model.revision,
            allow_patterns=["*.json", "*.safetensors"],
        )
    )


def weights_digest(config: Config) -> str:
    """The digest of the model's weight files. Raises ConfigError where they cannot be had."""
    return files_digest(sorted(model_folder(config).glob("*.safetensors")))


def generate_answers(
    config: Config,
    renderer: Renderer,
    asked: list[Prompt],
    requests: list[Request],
    world: World,
    log_dir: Path,
    name: str,
) -> list[list[list[Sample]]]:
    """[requests][prompts][n] answers, drawn with ``config.seed``; the same on every rank, each of which calls
    it. Those that are kept from earlier are not drawn; where all are, no weights are loaded. ``name``: whose
    they are, for the progress bar.

    Raises WorkerError, and ConfigError for weights that cannot be had.
    """
    kept, known = on_main(lambda: _kept(config, renderer, requests))
    if all(prompt.id in found for found in known for prompt in asked):
        return [[found[prompt.id] for prompt in asked] for found in known]
    with open_sampler(config, renderer, world, log_dir) as drawer:

        def draw(
            request: Request, keeper: AnswerCache, found: Mapping[str, list[Sample]]
        ) -> list[list[Sample]]:
            every = dict(found)
            left = list({prompt.id: prompt for prompt in asked if prompt.id not in every}.values())
            left.sort(key=lambda prompt: -len(renderer.prompt_ids(prompt)))
            rows = (config.sampler.batch_size or config.model.eval_batch_size) * world.size
            size = _part(len(left), request.n, config.sampler.name, rows)
            with progress(
                len(asked),
                f"{name}: {request.what}",
                unit="prompt",
                done=len(asked) - len(left),
                shown=world.is_main,
            ) as bar:
                for first in range(0, len(left), size):
                    part = left[first : first + size]
                    drawn = drawer.sample(part, request.n, request.settings, config.seed)
                    new = {prompt.id: samples for prompt, samples in zip(part, drawn, strict=True)}
                    keeper.add(new)
                    every |= new
                    bar.update(len(part))
            return [every[prompt.id] for prompt in asked]

        made: list[list[list[Sample]]] = drawer.run_on_main(
            lambda: [draw(*one) for one in zip(requests, kept, known, strict=True)]
        )
    if world.device.type == "cuda":
        torch.cuda.empty_cache()
    return made


def _kept(
    config: Config, renderer: Renderer, requests: list[Request]
) -> tuple[list[AnswerCache], list[dict[str, list[Sample]]]]:
    """Where each request's answers are kept, and those that are there, by prompt id (the digest of its
    turns)."""
    model, sampler = config.model, config.sampler
    shared = {
        "weights": weights_digest(config),
        "text": renderer.fingerprint,
        "seed": config.seed,
        "model": [model.dtype, model.attn_implementation, model.max_length, model.max_prompt_length],
        "sampler": [sampler.name, sampler.dtype],
    }
    kept = [
        AnswerCache(Path(config.cache_dir), shared | {"n": request.n, "settings": asdict(request.settings)})
        for request in requests
    ]
    return kept, [one.read() for one in kept]


def _part(n_prompts: int, n: int, sampler: str, rows: int) -> int:
    """How many prompts are answered between two movements of the bar: a batch's worth."""
    if sampler == "vllm":
        return max(math.ceil(n_prompts / _VLLM_PARTS), math.ceil(_VLLM_IN_FLIGHT / n))
    return max(1, rows // n)
