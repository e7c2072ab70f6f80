"""Checking sampled answers: the verifier that a data set names, and the accuracy that evaluation reports."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

from common.imports import import_function
from config.schema import Config
from data.chat import Renderer
from data.types import Group, Prompt
from data.views import prompts_of
from models.distributed import World, gather_objects, on_main
from models.policy import Policy
from rollouts.answer_cache import AnswerCache
from rollouts.samplers import EmbeddedSampler, Sample, Sampler, SamplingSettings

Verifier = Callable[[list[str], list[str | None]], list[float | None]]
"""(completions, reference answers) -> verdicts in [0, 1]; None: no verdict, which is not a 0."""

TEMPERATURE = 0.7
"""Of sampled accuracy, with top-p 1: the policy's own distribution, not its truncation (spec of the
verifiable setting, §5.2)."""


SHOWN = 16
"""Samples of an evaluation that are kept to be looked at."""


class Accuracy:
    """What evaluation calls for ``accuracy_sampled`` (``samples`` answers a prompt at temperature 0.7, top-p
    1, always the same seed) and ``accuracy_greedy`` (one): the mean verdict over ``prompts``, None where
    there is no verdict at all.

    Every rank calls it and samples its own share; the result is the same on every rank.
    """

    columns = ("kind", "prompt", "answer", "reference", "verdict")

    def __init__(
        self,
        sampler: Sampler,
        prompts: list[Prompt],
        verifier: Verifier,
        renderer: Renderer,
        world: World,
        max_tokens: int,
        seed: int = 0,
        samples: int = 1,
    ) -> None:
        self.sampler, self.prompts, self.verifier, self.renderer, self.world = (
            sampler,
            prompts,
            verifier,
            renderer,
            world,
        )
        self.settings = {
            "sampled": SamplingSettings(TEMPERATURE, 1.0, max_tokens),
            "greedy": SamplingSettings(0.0, 1.0, max_tokens),
        }
        self.seed = seed
        self.counts = {"sampled": samples, "greedy": 1}
        self.samples: list[tuple[str, str, str, str | None, float | None]] = []
        """A few rows of ``columns`` from the last call, of this rank's share."""
        self.kept: dict[str, AnswerCache] = {}

    def use_cache(self, cache_dir: Path, parts: Mapping[str, str]) -> None:
        """Let calls with ``initial`` take the initial weights' answers from ``cache_dir``, and leave them
        there. ``parts``: what answers depend on beside the sampling."""
        for kind, settings in self.settings.items():
            drawn = {"settings": asdict(settings), "n": self.counts[kind], "seed": self.seed}
            self.kept[kind] = AnswerCache(cache_dir, {**parts, **drawn})

    def __call__(self, initial: bool = False) -> dict[str, float | None]:
        """``initial``: the policy has its initial weights."""
        self.samples = []
        return {
            f"accuracy_{kind}": self._measure(kind, self.kept.get(kind) if initial else None)
            for kind in self.settings
        }

    def _answers(self, kind: str, kept: AnswerCache | None) -> list[list[Sample]]:
        """The answers to this rank's share of the prompts."""
        share = self.prompts[self.world.rank :: self.world.size]
        known: dict[str, list[Sample]] = {} if kept is None else on_main(kept.read)
        if kept is None or not all(prompt.id in known for prompt in self.prompts):
            drawn = self.sampler.sample(share, self.counts[kind], self.settings[kind], self.seed)
            if kept is None:
                return drawn
            for part in gather_objects(
                {prompt.id: samples for prompt, samples in zip(share, drawn, strict=True)}
            ):
                known |= part
            on_main(lambda: kept.add(known))
        return [known[prompt.id] for prompt in share]

    def _measure(self, kind: str, kept: AnswerCache | None) -> float | None:
        share = self.prompts[self.world.rank :: self.world.size]
        sampled = self._answers(kind, kept)
        texts = [
            sample.completion(self.renderer.tokenizer).text or ""
            for of_prompt in sampled
            for sample in of_prompt
        ]
        mine = [prompt for prompt in share for _ in range(self.counts[kind])]
        verdicts = self.verifier(texts, [p.reference_answer for p in mine])
        for prompt, text, verdict in list(zip(mine, texts, verdicts, strict=True))[:SHOWN]:
            self.samples.append((kind, prompt.turns[-1].content, text, prompt.reference_answer, verdict))
        known = [v for part in gather_objects(verdicts) for v in part if v is not None]
        return sum(known) / len(known) if known else None


def make_accuracy(
    config: Config, policy: Policy, renderer: Renderer, held_out: list[Group], world: World
) -> Accuracy | None:
    """What evaluation calls, or None where answers cannot be checked: ``data.verifier`` names nothing, or no
    held-out prompt has a reference answer. Prompts are taken by their id, so that fewer of them are a fair
    draw. Raises ConfigError."""
    if config.data.verifier is None:
        return None
    verifier: Verifier = import_function("data.verifier", config.data.verifier)
    prompts = sorted((p for p in prompts_of(held_out) if p.reference_answer is not None), key=lambda p: p.id)
    prompts = prompts[: config.n_eval_prompts]
    if not prompts:
        return None
    sampler = EmbeddedSampler(
        policy, renderer, world.device, batch_size=config.model.eval_batch_size, synced=world.size > 1
    )
    return Accuracy(
        sampler,
        prompts,
        verifier,
        renderer,
        world,
        config.model.max_length - config.model.max_prompt_length,
        samples=config.n_eval_samples,
    )
