"""What a sampler draws, and the interface ``Sampler``, which rounds, evaluations and sample.py use.
``sampler._target_`` names a class of this kind; no other code knows samplers by name.

Prompts are rendered by the function that renders them for training, every sampling field is explicit, and
samples are token ids. Each token comes with its log-probability under the policy that drew it, at
``model.logit_temperature`` and before top-p. This is the policy's own probability of the token, not the
probability with which the sampler drew it. The trainer computes its own log-probabilities of the samples.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from common.errors import require
from common.imports import import_function
from config.schema import Config
from data.chat import Renderer, vocabulary_fingerprint
from data.types import Completion, Prompt
from models.distributed import Ranks, World, ended_together, on_main
from models.export import export, full_state
from models.policy import Policy

Facts = dict[str, Any]


@dataclass(frozen=True)
class SamplingSettings:
    """The settings that alone decide how tokens are drawn: a model's generation_config.json is not read."""

    temperature: float
    """0: greedy"""
    top_p: float
    """the next token comes from the smallest set of tokens with this probability; 1: from all"""
    max_tokens: int
    """length in tokens at which a sample is cut"""

    @classmethod
    def from_config(cls, config: Config) -> SamplingSettings:
        """Return the settings of a run's samples."""
        return cls(config.sampler.temperature, config.sampler.top_p, config.max_tokens)


@dataclass(frozen=True)
class Sample:
    """One sampled answer."""

    token_ids: tuple[int, ...]
    """the sampled tokens, with the stop token at the end if ``finished`` and not ``stopped``"""
    finished: bool
    """False if the sample was cut by max_tokens"""
    logprobs: tuple[float, ...] = field(default=(), compare=False)
    """log mu: log-probability of each token under the sampling policy, nats, at model.logit_temperature and
    without top-p; () if the sampler cannot report them"""
    stopped: str = ""
    """as in ``Completion.stopped``"""

    def completion(self, renderer: Renderer, temperature: float = 1.0) -> Completion:
        """Return the sample as a groups file records it: the token ids, which are trained on unchanged, and
        the text, for verifiers and readers. ``temperature``: the temperature of ``logprobs``."""
        text = renderer.said(self.token_ids)
        return Completion(
            text.partition(self.stopped)[0] if self.stopped else text,
            self.token_ids,
            self.finished,
            vocabulary_fingerprint(renderer.tokenizer),
            self.logprobs or None,
            temperature if self.logprobs else 1.0,
            stopped=self.stopped,
        )


@dataclass(frozen=True)
class Continuation:
    """One sample to be drawn."""

    key: str
    """the prompt's id, followed by the part in later parts of an answer; with ``index`` and the seed it
    determines the sample's random numbers"""
    index: int
    ids: np.ndarray
    """[P] int32: the tokens that the sample continues"""
    max_tokens: int


def rows_of(
    renderer: Renderer, prompts: list[Prompt], n: int, settings: SamplingSettings
) -> list[Continuation]:
    """Return ``n`` rows for each prompt, with those of one prompt together. Raises DataError for a prompt
    that cannot be rendered."""
    ids = [renderer.prompt_ids(prompt) for prompt in prompts]
    return [
        Continuation(prompt.id, i, of_prompt, settings.max_tokens)
        for prompt, of_prompt in zip(prompts, ids, strict=True)
        for i in range(n)
    ]


class Sampler(Protocol):
    """Draws answers with the weights of a run's policy (``attach``, then ``publish`` for each round) or with
    those of the settings' model (``load``).

    Every rank has a sampler and makes the same calls, but for ``sample`` and ``sleep``: rank 0 alone calls
    these, inside ``ranks.on_main``, where a sampler may ask the other ranks to help (``models.distributed``).
    """

    ranks: Ranks

    @classmethod
    def check(cls) -> None:
        """Raise ConfigError if this kind of sampler cannot run at all."""

    @classmethod
    def from_config(cls, config: Config, renderer: Renderer, world: World, log_dir: Path) -> Sampler:
        """Return the sampler that the settings describe, before any weights load. The output of its processes
        goes to ``log_dir``. Raises ConfigError."""
        ...

    def attach(self, policy: Policy, prompts: list[Prompt]) -> None:
        """Draw with the weights of ``policy``, once they are published. ``prompts``: those of the run, for a
        probe."""

    def load(self) -> None:
        """Draw with the weights of the settings' ``model``, outside rounds. Raises ConfigError,
        WorkerError."""

    def part(self, prompts: int, n: int) -> int:
        """Return how many of ``prompts`` prompts, with ``n`` answers each, to sample between two updates of a
        progress bar."""
        ...

    def publish(self, folder: Path, version: int, keep: bool) -> Facts:
        """Draw with the policy's current weights from now on. ``folder``: for files that have to be written;
        it may be deleted once the round is sampled. ``keep``: write the weights there in any case. Returns
        facts to record. Raises WorkerError."""
        ...

    def sample(
        self, prompts: list[Prompt], n: int, settings: SamplingSettings, seed: int
    ) -> list[list[Sample]]:
        """Return ``n`` answers to each prompt, in order. Raises DataError for a prompt that cannot be
        rendered, and WorkerError."""
        ...

    def layout(self) -> Facts:
        """Return what samples depend on besides weights and requests, such as who draws which. Samples of a
        round that was interrupted are drawn again where it is another."""
        ...

    def dealt(self) -> Facts:
        """Return, for the record, who has drawn how much since the last call."""
        ...

    def sleep(self) -> None:
        """Release accelerator memory until the next ``publish``."""

    def close(self) -> None:
        """End its processes."""


def sampler_class(config: Config) -> type[Sampler]:
    """Return the class that ``sampler._target_`` names. Raises ConfigError if it cannot be imported, or
    cannot run here."""
    found: type[Sampler] = import_function("sampler._target_", config.sampler._target_)
    found.check()
    return found


def make_sampler(config: Config, renderer: Renderer, world: World, log_dir: Path) -> Sampler:
    """Return the sampler that the settings name (``Sampler.from_config``). Raises ConfigError."""
    return sampler_class(config).from_config(config, renderer, world, log_dir)


def refuse_options(config: Config) -> None:
    """Raise ConfigError if there are ``sampler.options``, for a sampler that takes none and would not read
    them."""
    options = config.sampler.options
    require(not options, "sampler.options", options, f"sampler={config.sampler.name} takes none")


def write_weights(
    policy: Policy, tokenizer: PreTrainedTokenizerBase, folder: Path, dtype: torch.dtype
) -> None:
    """Write the policy's current weights to ``folder``, within the run, as a model. Every rank calls it.
    Raises OSError on all ranks."""
    with ended_together():
        state = full_state(policy)

    def write() -> None:
        export(state, policy, tokenizer, folder, dtype)

    on_main(write)
