"""The sampler interface, and the embedded sampler on transformers' own generation.

Prompts are rendered by the function that renders them for training, every sampling field is explicit, and
samples are token ids. Each token comes with its log-probability under the policy that drew it, at
``model.logit_temperature`` and before top-p. This is the policy's own probability of the token, not the
probability with which the sampler drew it. The trainer computes its own log-probabilities of the samples.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Protocol

import numpy as np
import torch

from common.progress import SOON, progress
from data.chat import Renderer, vocabulary_fingerprint
from data.types import Completion, Prompt
from models.distributed import gather_objects
from models.policy import Policy
from models.sharding import gathered_once
from rollouts.decoding import Decoder


@dataclass(frozen=True)
class SamplingSettings:
    """The settings that alone decide how tokens are drawn: a model's generation_config.json is not read."""

    temperature: float
    """0: greedy"""
    top_p: float
    """the next token comes from the smallest set of tokens with this probability; 1: from all"""
    max_tokens: int
    """length in tokens at which a sample is cut"""


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
        said = renderer.said(self.token_ids)
        return Completion(
            said.partition(self.stopped)[0] if self.stopped else said,
            self.token_ids,
            self.finished,
            vocabulary_fingerprint(renderer.tokenizer),
            self.logprobs or None,
            temperature if self.logprobs else 1.0,
            stopped=self.stopped,
        )


Answered = Callable[[int, list[Sample]], None]
"""Callback (index of the prompt, its samples), called as soon as all samples of the prompt are there."""


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


Draw = Callable[[list[Continuation], SamplingSettings, int, tuple[int, ...]], list[Sample]]
"""Function (rows, settings, seed, stop token ids) -> the rows' samples, in order."""


class Parts(Protocol):
    """Draws answers in parts (``rollouts.stop_strings``)."""

    def sample(
        self, draw: Draw, prompts: list[Prompt], n: int, settings: SamplingSettings, seed: int, synced: bool
    ) -> list[list[Sample]]:
        """Return ``n`` answers to each prompt. ``synced``: every rank samples a share, and calls ``draw`` as
        often as the others."""
        ...


class EmbeddedSampler:
    """Samples from the policy itself, with transformers' generate and a KV cache.

    Up to rounding, a sample depends only on the weights, its prompt, its index, the settings and the seed. It
    does not depend on the batch in which it is computed, the number of ranks, or the state of any random
    number generator. So equal prompts get equal samples.
    """

    def __init__(
        self,
        policy: Policy,
        renderer: Renderer,
        device: torch.device,
        *,
        batch_size: int,
        synced: bool,
        stops: Parts | None = None,
        what: str = "sample (rounds.contexts_per_round, sampler.max_tokens)",
    ) -> None:
        """``what``: the words of its bar, with the settings that bound it. ``batch_size``: rows generated at
        once. ``synced``: the policy is sharded over several ranks, each
        of which samples its own share. Every rank then runs as many forwards as the slowest, and must call
        ``sample`` even if its share is empty. ``stops``: ends answers at ``sampler.stop``; None: only an end
        token does."""
        self.stops, self.what = stops, what
        self.policy, self.renderer, self.decoder = policy, renderer, Decoder(policy, device, synced)
        self.batch_size, self.synced = batch_size, synced

    def sample(
        self, prompts: list[Prompt], n: int, settings: SamplingSettings, seed: int
    ) -> list[list[Sample]]:
        """Return ``n`` answers to each prompt. Raises DataError for a prompt that cannot be rendered."""
        if self.stops is not None:
            return self.stops.sample(self.draw, prompts, n, settings, seed, self.synced)
        rows = rows_of(self.renderer, prompts, n, settings)
        drawn = self.draw(rows, settings, seed, self.renderer.stop_token_ids)
        return [drawn[i : i + n] for i in range(0, len(drawn), n)]

    def draw(
        self, rows: list[Continuation], settings: SamplingSettings, seed: int, stops: tuple[int, ...]
    ) -> list[Sample]:
        """Return a sample for each row, which ends with one of ``stops`` or at the row's own
        ``max_tokens``."""
        order = sorted(range(len(rows)), key=lambda i: -len(rows[i].ids))
        batches = [order[i : i + self.batch_size] for i in range(0, len(order), self.batch_size)]
        rounds = max(gather_objects(len(batches))) if self.synced else len(batches)
        out = [Sample((), False)] * len(rows)
        most = [max(rows[i].max_tokens for i in batch) for batch in batches]
        with (
            gathered_once(self.policy, several=self.synced),
            progress(sum(most), self.what, unit="token", shown=None, delay=SOON) as bar,
        ):
            self.decoder.tick = bar.update
            for batch, done in zip(batches, accumulate(most), strict=True):
                drawn = self._generate([rows[i] for i in batch], settings, seed, stops)
                for i, sample in zip(batch, drawn, strict=True):
                    out[i] = sample
                bar.update(done - bar.n)
            for _ in range(rounds - len(batches)):
                self._generate([Continuation("", 0, np.array(stops[:1]), 1)], settings, seed, stops)
        return out

    def _generate(
        self, rows: list[Continuation], settings: SamplingSettings, seed: int, stops: tuple[int, ...]
    ) -> list[Sample]:
        limits = [row.max_tokens for row in rows]
        draws = [uniforms(seed, row.key, row.index, max(limits)) for row in rows]
        tokens, logprobs = self.decoder.decode(
            [row.ids for row in rows],
            limits,
            draws if settings.temperature > 0 else None,
            settings.temperature,
            settings.top_p,
            stops,
        )
        return [
            _ended(made, values, set(stops), row.max_tokens)
            for row, made, values in zip(rows, tokens.tolist(), logprobs, strict=True)
        ]


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


def uniforms(seed: int, prompt_id: str, index: int, n: int) -> np.ndarray:
    """Return the random numbers of one sample, one per token: [n] float32 in [0, 1)."""
    key = hashlib.blake2b(f"{seed}/{prompt_id}/{index}".encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(key))).random(n, dtype=np.float32)


def _ended(tokens: list[int], logprobs: np.ndarray, stops: set[int], max_tokens: int) -> Sample:
    """Cut a generated row after its first stop token, behind which there is padding, or at ``max_tokens``."""
    end = next((i for i, token in enumerate(tokens[:max_tokens]) if token in stops), None)
    kept = max_tokens if end is None else end + 1
    # The shortest decimal that is the same float32 takes half the space of the float64 in a file.
    values = tuple(float(str(value)) for value in logprobs[:kept])
    return Sample(tuple(tokens[:kept]), end is not None, values)
