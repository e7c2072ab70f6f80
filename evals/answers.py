"""Sample a target's answers to the prompts of its data with the samplers of the rounds."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Any

from common.errors import require
from config.schema_stages import EvalStage
from data.chat import Renderer, make_renderer
from data.quality import limit_tokens
from data.sources import load_groups
from data.types import Prompt
from data.views import prompts_of
from evals.base import Target
from models.distributed import World
from models.pretrained import check_model, load_tokenizer
from rollouts.answers import Request, generate_answers
from rollouts.rounds import usable_prompts
from rollouts.samplers import Sample, sampler_class

OF_DATA = (
    *("name", "path", "eval_path", "revision", "subset", "split", "eval_split", "eval_fraction"),
    *("system_prompt", "apply_chat_template"),
)
"""Settings of the data that decide which prompts are answered, and how they are rendered."""


def check_answering(target: Target) -> Renderer:
    """Return the target's renderer.

    Raises ConfigError, before weights are loaded, for anything that would keep the target from answering."""
    config = target.config
    sampler_class(config)
    config.check_room()
    hf_config = check_model(config.model)
    renderer = make_renderer(load_tokenizer(config.model), config.model, config.data)
    limit_tokens(renderer.tokenizer, hf_config.get_text_config().vocab_size, renderer.stop_token_ids)
    return renderer


def prompts(target: Target, stage: EvalStage, renderer: Renderer) -> tuple[list[Prompt], Counter[str]]:
    """Return (the prompts to answer, the number of unusable prompts by reason).

    Raises ConfigError, also where no prompt is usable, and DataError."""
    data = target.config.data
    every = prompts_of(load_groups(data, "eval" if stage.split == "eval" else "train").groups)
    usable, refused = usable_prompts(every, renderer)
    require(
        bool(usable),
        "data",
        data.name,
        f"has no prompt to answer in split={stage.split}: {dict(refused) or 'none read'}",
    )
    return limited(usable, stage.limit), refused


def limited(every: list[Prompt], limit: int | None) -> list[Prompt]:
    """Return the ``limit`` prompts with the smallest ids, in the order of ``every``.

    The choice does not depend on the order of the data."""
    chosen = set(sorted(prompt.id for prompt in every)[:limit])
    return [prompt for prompt in every if prompt.id in chosen]


def sample(
    target: Target, renderer: Renderer, usable: list[Prompt], requests: list[Request], world: World
) -> list[list[list[Sample]]]:
    """Return the answers as [requests][prompts][n], drawn with the target's seed.

    Every rank calls it and gets the same result. Raises WorkerError, and ConfigError for weights that cannot
    be loaded.
    """
    return generate_answers(
        target.config, renderer, usable, requests, world, (target.run or target.out) / "logs", target.name
    )


def described(target: Target, stage: EvalStage) -> dict[str, Any]:
    """Return the settings that the answers depend on, for the result's ``settings``."""
    config = target.config
    return {
        "target": target.name,
        "step": target.step,
        "model": None if target.step is not None else config.model.name_or_path,
        "dtype": config.model.dtype,
        "max_length": config.model.max_length,
        "max_prompt_length": config.model.max_prompt_length,
        "data": {key: getattr(config.data, key) for key in OF_DATA},
        "part": stage.split,
        "limit": stage.limit,
        "sampler": {
            key: value
            for key, value in (asdict(config.sampler) | {"max_tokens": config.max_tokens}).items()
            if key in ("name", "temperature", "top_p", "max_tokens", "dtype")
        },
        "seed": config.seed,
        "resamples": stage.resamples,
        "confidence": stage.confidence,
    }
