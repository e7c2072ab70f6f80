"""Checking sampled answers: the verifier that a data set names, and the accuracy that evaluation reports."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from config.schema import Config
from data.chat import Renderer
from data.sources import import_function
from data.types import Group, Prompt
from data.views import prompts_of
from models.distributed import World, gather_objects
from models.policy import Policy
from rollouts.samplers import EmbeddedSampler, Sampler, SamplingSettings

Verifier = Callable[[list[str], list[str | None]], list[float | None]]
"""(completions, reference answers) -> verdicts in [0, 1]; None: no verdict, which is not a 0."""

TEMPERATURE = 0.7
"""Of sampled accuracy, with top-p 1: the policy's own distribution, not its truncation (spec of the verifiable setting, §5.2)."""


def accuracy(sampler: Sampler, prompts: list[Prompt], settings: SamplingSettings, verifier: Verifier, renderer: Renderer,
             world: World, seed: int = 0) -> float | None:
    """The mean verdict over one sample a prompt, of all ranks' prompts; None where there is no verdict at all.

    Every rank calls it, with the same ``prompts``, and samples its own share; the result is the same on every rank.
    """
    mine = prompts[world.rank :: world.size]
    samples = [of_prompt[0] for of_prompt in sampler.sample(mine, 1, settings, seed)]
    texts = [sample.completion(renderer.tokenizer).text or "" for sample in samples]
    verdicts = [v for part in gather_objects(verifier(texts, [p.reference for p in mine])) for v in part if v is not None]
    return sum(verdicts) / len(verdicts) if verdicts else None


def evaluate_accuracy(sampler: Sampler, prompts: list[Prompt], verifier: Verifier, renderer: Renderer, world: World,
                      max_tokens: int) -> dict[str, float | None]:
    """``accuracy_sampled`` (one sample at temperature 0.7, top-p 1, always the same seed) and ``accuracy_greedy``."""
    kinds = {"sampled": TEMPERATURE, "greedy": 0.0}
    settings = {kind: SamplingSettings(temperature, 1.0, max_tokens) for kind, temperature in kinds.items()}
    return {f"accuracy_{kind}": accuracy(sampler, prompts, settings[kind], verifier, renderer, world) for kind in kinds}


def make_accuracy(config: Config, policy: Policy, renderer: Renderer, held_out: list[Group], world: World,
                  ) -> Callable[[], dict[str, float | None]] | None:
    """What evaluation calls, or None where answers cannot be checked: ``data.verifier`` names nothing, or no held-out prompt has a
    reference answer. Prompts are taken by their id, so that fewer of them are a fair draw. Raises ConfigError."""
    if config.data.verifier is None:
        return None
    verifier: Verifier = import_function("data.verifier", config.data.verifier)
    prompts = sorted((p for p in prompts_of(held_out) if p.reference is not None), key=lambda p: p.id)
    if not prompts:
        return None
    sampler = EmbeddedSampler(policy, renderer, world.device, batch_size=config.model.eval_batch_size, synced=world.size > 1)
    max_tokens = config.model.max_length - config.model.max_prompt_length
    return partial(evaluate_accuracy, sampler, prompts, verifier, renderer, world, max_tokens)
