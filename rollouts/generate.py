"""Answers of a model to many prompts outside a run's rounds, for the stages and for evaluation. Answers are
stored as they are drawn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from common.progress import progress
from config.schema import Config
from data.chat import Renderer
from data.types import Prompt
from models.distributed import World, on_main
from models.fingerprint import architecture_digest
from rollouts.answers import AnswerCache
from rollouts.samplers import Sample, SamplingSettings
from rollouts.sampling import make_sampling
from rollouts.stop_strings import facts_of
from rollouts.weights import weights_digest


@dataclass(frozen=True)
class Request:
    """A request for ``n`` answers to every prompt."""

    what: str
    """description that the progress bar shows"""
    n: int
    settings: SamplingSettings


def settings_of(config: Config) -> SamplingSettings:
    """Return the sampling settings of a run."""
    return SamplingSettings(config.sampler.temperature, config.sampler.top_p, config.max_tokens)


def generate_answers(
    config: Config,
    renderer: Renderer,
    asked: list[Prompt],
    requests: list[Request],
    world: World,
    log_dir: Path,
    name: str,
) -> list[list[list[Sample]]]:
    """Return [requests][prompts][n] answers, drawn with ``config.seed``. Every rank calls it and gets the
    same answers. Answers kept from earlier are not drawn again; if all are kept, no weights are loaded.
    ``name``: whose answers they are, for the progress bar.

    Raises WorkerError, and ConfigError for weights that cannot be obtained.
    """
    kept, known = on_main(lambda: _kept(config, renderer, requests))
    if all(prompt.id in answers for answers in known for prompt in asked):
        return [[answers[prompt.id] for prompt in asked] for answers in known]
    sampling = make_sampling(config, renderer, world, log_dir)
    with sampling.opened() as sampler:

        def draw(
            request: Request, keeper: AnswerCache, answers: Mapping[str, list[Sample]]
        ) -> list[list[Sample]]:
            every = dict(answers)
            left = list({prompt.id: prompt for prompt in asked if prompt.id not in every}.values())
            left.sort(key=lambda prompt: -len(renderer.prompt_ids(prompt)))
            size = sampling.part(len(left), request.n)
            with progress(
                len(asked),
                f"{name}: {request.what}",
                unit="prompt",
                done=len(asked) - len(left),
                shown=world.is_main,
            ) as bar:
                for first in range(0, len(left), size):
                    part, done = left[first : first + size], bar.n
                    drawn = sampler.sample(
                        part, request.n, request.settings, config.seed, lambda which, samples: bar.update()
                    )
                    new = {prompt.id: samples for prompt, samples in zip(part, drawn, strict=True)}
                    keeper.add(new)
                    every |= new
                    bar.update(done + len(part) - bar.n)
            return [every[prompt.id] for prompt in asked]

        made: list[list[list[Sample]]] = sampler.ranks.on_main(
            lambda: [draw(*one) for one in zip(requests, kept, known, strict=True)]
        )
    if world.device.type == "cuda":
        torch.cuda.empty_cache()
    return made


def _kept(
    config: Config, renderer: Renderer, requests: list[Request]
) -> tuple[list[AnswerCache], list[dict[str, list[Sample]]]]:
    """Return each request's cache of answers, and the answers in it by prompt id (the digest of the prompt's
    turns)."""
    model, sampler = config.model, config.sampler
    shared = {
        "weights": weights_digest(config),
        "architecture": architecture_digest(model),
        "built": [model.from_config, model.quantization, asdict(model.peft) if model.use_peft else None],
        "text": renderer.fingerprint,
        "seed": config.seed,
        "model": [model.dtype, model.attn_implementation, model.max_length, model.max_prompt_length],
        "sampler": [sampler.name, sampler.dtype],
        "logit_temperature": model.logit_temperature,
        **facts_of(config),
    }
    kept = [
        AnswerCache(Path(config.cache_dir), shared | {"n": request.n, "settings": asdict(request.settings)})
        for request in requests
    ]
    return kept, [one.read() for one in kept]
