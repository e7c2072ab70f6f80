"""Answers of a target to the prompts of its data, with the samplers of the rounds."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from config.checks import require
from config.schema_eval import EvalStage
from data.chat import Renderer, make_renderer
from data.sources import load_groups
from data.types import Prompt
from data.views import prompts_of
from evals.base import Target, weights_digest
from models.distributed import World, on_main
from models.policy import check_model, load_tokenizer
from rollouts.kept import KeptAnswers
from rollouts.samplers import Sample, SamplingSettings
from rollouts.setup import usable_prompts
from rollouts.stages import opened
from rollouts.vllm_sampler import require_installed
from trainers.progress import progress

_VLLM_PARTS, _VLLM_IN_FLIGHT = 20, 512
"""vLLM is asked in so many parts, so that there is something to show, but for at least so many samples at once."""


@dataclass(frozen=True)
class Request:
    """``n`` answers to every prompt."""

    what: str
    """said by the progress bar"""
    n: int
    settings: SamplingSettings


def check_answering(target: Target) -> Renderer:
    """The target's renderer. Raises ConfigError for what would keep it from answering, before weights are loaded."""
    config = target.config
    require(config.model.head != "reward", "run", target.run or target.name, "is a reward model: it answers nothing")
    if config.sampler.name == "vllm":
        require_installed()
    config.check_room()
    check_model(config.model)
    return make_renderer(load_tokenizer(config.model), config.model, config.data)


def prompts(target: Target, stage: EvalStage, renderer: Renderer) -> tuple[list[Prompt], Counter[str]]:
    """(the prompts to be answered, for what reasons how many others cannot be). Raises ConfigError, DataError; where there is none too."""
    data = target.config.data
    every = prompts_of(load_groups(data, "eval" if stage.split == "eval" else "train").groups)
    usable, refused = usable_prompts(every, renderer)
    require(bool(usable), "data", data.name, f"has no prompt to answer in split={stage.split}: {dict(refused) or 'none read'}")
    return limited(usable, stage.limit), refused


def limited(every: list[Prompt], limit: int | None) -> list[Prompt]:
    """The ``limit`` prompts with the smallest ids, in their order: a fair draw, whatever the order of the data."""
    if limit is None:
        return every
    chosen = set(sorted(prompt.id for prompt in every)[:limit])
    return [prompt for prompt in every if prompt.id in chosen]


def sample(target: Target, renderer: Renderer, asked: list[Prompt], requests: list[Request], world: World) -> list[list[list[Sample]]]:
    """[requests][prompts][n] answers, drawn with the target's seed; the same on every rank, each of which calls it. Those that an earlier
    evaluation has drawn are kept (``rollouts.kept``); where all are, no weights are loaded.

    Raises SamplerError, and ConfigError for weights that cannot be had.
    """
    config = target.config
    kept, known = on_main(lambda: _kept(target, renderer, requests))
    if all(prompt.id in answers for answers in known for prompt in asked):
        return [[answers[prompt.id] for prompt in asked] for answers in known]
    with opened(config, renderer, world, (target.run or target.out) / "logs") as drawer:

        def draw(request: Request, keeper: KeptAnswers, found: dict[str, list[Sample]]) -> list[list[Sample]]:
            left = list({prompt.id: prompt for prompt in asked if prompt.id not in found}.values())
            left.sort(key=lambda prompt: -len(renderer.prompt_ids(prompt)))
            rows = (config.sampler.batch_size or config.model.eval_batch_size) * world.size
            size = _part(len(left), request.n, config.sampler.name, rows)
            done = len(asked) - len(left)
            with progress(len(asked), f"{target.name}: {request.what}", unit="prompt", done=done, shown=world.is_main) as bar:
                for first in range(0, len(left), size):
                    part = left[first : first + size]
                    drawn = drawer.sample(part, request.n, request.settings, config.seed)
                    new = {prompt.id: samples for prompt, samples in zip(part, drawn, strict=True)}
                    keeper.add(new)
                    found |= new
                    bar.update(len(part))
            return [found[prompt.id] for prompt in asked]

        answers: list[list[list[Sample]]] = drawer.together(
            lambda: [draw(*one) for one in zip(requests, kept, known, strict=True)])
    if world.device.type == "cuda":
        torch.cuda.empty_cache()
    return answers


def _kept(target: Target, renderer: Renderer, requests: list[Request]) -> tuple[list[KeptAnswers], list[dict[str, list[Sample]]]]:
    """Where each request's answers are kept, and those that are there, by prompt id (the digest of its turns)."""
    model, sampler = target.config.model, target.config.sampler
    shared = {"weights": weights_digest(target), "text": renderer.fingerprint, "seed": target.config.seed,
              "model": [model.dtype, model.attn_implementation, model.max_length, model.max_prompt_length],
              "sampler": [sampler.name, sampler.dtype]}
    cache = Path(target.config.cache_dir)
    kept = [KeptAnswers(cache, shared | {"n": request.n, "settings": asdict(request.settings)}) for request in requests]
    return kept, [one.read() for one in kept]


def _part(n_prompts: int, n: int, sampler: str, rows: int) -> int:
    """How many prompts are answered between two movements of the bar: a batch's worth."""
    if sampler == "vllm":
        return max(math.ceil(n_prompts / _VLLM_PARTS), math.ceil(_VLLM_IN_FLIGHT / n))
    return max(1, rows // n)


def described(target: Target, stage: EvalStage) -> dict[str, Any]:
    """The settings that answers depend on, for the result's ``settings``."""
    config = target.config
    keys = ("name", "path", "eval_path", "revision", "subset", "split", "eval_split", "eval_fraction", "system_prompt",
            "apply_chat_template")
    return {
        "target": target.name, "step": target.step, "model": None if target.step is not None else config.model.name_or_path,
        "dtype": config.model.dtype, "max_length": config.model.max_length, "max_prompt_length": config.model.max_prompt_length,
        "data": {key: getattr(config.data, key) for key in keys}, "part": stage.split, "limit": stage.limit,
        "sampler": {key: value for key, value in asdict(config.sampler).items()
                    if key in ("name", "temperature", "top_p", "max_tokens", "dtype")},
        "seed": config.seed, "resamples": stage.resamples, "confidence": stage.confidence,
    }
