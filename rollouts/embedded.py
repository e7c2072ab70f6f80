"""The sampler ``sampler=embedded``, which is transformers' own generation with a KV cache, in the trainer's
processes. Every rank samples a share of the prompts."""

from __future__ import annotations

import hashlib
from itertools import accumulate
from pathlib import Path
from typing import Self

import numpy as np
import torch

from common.progress import SOON, progress
from config.schema import Config
from config.schema_model import ModelConfig
from data.chat import Renderer
from data.types import Prompt
from models.distributed import Ranks, World, gather_objects
from models.loading import load_sharded
from models.policy import Policy
from models.sharding import gathered_once
from rollouts.decoding import Decoder
from rollouts.samplers import (
    Continuation,
    Facts,
    Sample,
    SamplingSettings,
    refuse_options,
    rows_of,
    write_weights,
)
from rollouts.stop_strings import StopStrings, stop_strings_of


class EmbeddedSampler:
    """The policy itself samples (a ``rollouts.samplers.Sampler``).

    Up to rounding, a sample depends only on the weights, its prompt, its index, the settings and the seed. It
    does not depend on the batch in which it is computed, the number of ranks, or the state of any random
    number generator. So equal prompts get equal samples.
    """

    @classmethod
    def check(cls) -> None:
        """Does nothing: this sampler runs everywhere."""

    @classmethod
    def from_config(cls, config: Config, renderer: Renderer, world: World, log_dir: Path) -> Self:
        refuse_options(config)
        rows = config.sampler.batch_size or config.model.eval_batch_size
        stops = stop_strings_of(config, renderer)
        return cls(None, renderer, world, batch_size=rows, stops=stops, model=config.model)

    def __init__(
        self,
        policy: Policy | None,
        renderer: Renderer,
        world: World,
        *,
        batch_size: int,
        stops: StopStrings | None = None,
        model: ModelConfig | None = None,
        what: str = "sample (rounds.contexts_per_round, sampler.max_tokens)",
    ) -> None:
        """``policy``: None before ``attach`` or ``load``. ``batch_size``: rows generated at once. ``stops``:
        ends answers at ``sampler.stop``; None: only an end token does. ``model``: the settings that ``load``
        and ``publish`` read. ``what``: the words of its bar, with the settings that bound it."""
        self.policy, self.renderer, self.world = policy, renderer, world
        self.batch_size, self.stops, self.model, self.what = batch_size, stops, model, what
        self.ranks = Ranks()
        self._of_every_rank = self.ranks.collective(self._gathered)

    def attach(self, policy: Policy, prompts: list[Prompt]) -> None:
        """Every rank calls it; no probe is needed."""
        self.policy = policy

    def load(self) -> None:
        assert self.model is not None
        self.policy, _ = load_sharded(self.model, self.world)

    def part(self, prompts: int, n: int) -> int:
        """Return as many prompts as fill one batch on every rank."""
        return max(1, self.batch_size * self.world.size // n)

    def publish(self, folder: Path, version: int, keep: bool) -> Facts:
        """Write the weights to ``folder`` if they are kept. The sampler has them already."""
        if keep:
            assert self.policy is not None and self.model is not None
            dtype = getattr(torch, self.model.dtype)
            write_weights(self.policy, self.renderer.tokenizer, folder, dtype)
        return {}

    def sample(
        self, prompts: list[Prompt], n: int, settings: SamplingSettings, seed: int
    ) -> list[list[Sample]]:
        shares, size = self._of_every_rank((prompts, n, settings, seed)), self.world.size
        return [shares[i % size][i // size] for i in range(len(prompts))]

    def _gathered(self, request: tuple[list[Prompt], int, SamplingSettings, int]) -> list[list[list[Sample]]]:
        prompts, n, settings, seed = request
        return gather_objects(self.share(prompts[self.world.rank :: self.world.size], n, settings, seed))

    def share(
        self, prompts: list[Prompt], n: int, settings: SamplingSettings, seed: int
    ) -> list[list[Sample]]:
        """Return ``n`` answers to each of this rank's ``prompts``. Every rank calls it, even without any: the
        policy is sharded, and each runs as many forwards as the slowest. Raises DataError."""
        if self.stops is not None:
            return self.stops.sample(self.draw, prompts, n, settings, seed, self.world.size > 1)
        rows = rows_of(self.renderer, prompts, n, settings)
        drawn = self.draw(rows, settings, seed, self.renderer.stop_token_ids)
        return [drawn[i : i + n] for i in range(0, len(drawn), n)]

    def draw(
        self, rows: list[Continuation], settings: SamplingSettings, seed: int, stops: tuple[int, ...]
    ) -> list[Sample]:
        """Return a sample for each of this rank's rows, which ends with one of ``stops`` or at the row's own
        ``max_tokens``."""
        assert self.policy is not None, "the sampler has a policy"
        synced = self.world.size > 1
        decoder = Decoder(self.policy, self.world.device, synced)
        order = sorted(range(len(rows)), key=lambda i: -len(rows[i].ids))
        batches = [order[i : i + self.batch_size] for i in range(0, len(order), self.batch_size)]
        rounds = max(gather_objects(len(batches))) if synced else len(batches)
        out = [Sample((), False)] * len(rows)
        most = [max(rows[i].max_tokens for i in batch) for batch in batches]
        with (
            gathered_once(self.policy, several=synced),
            progress(sum(most), self.what, unit="token", shown=None, delay=SOON) as bar,
        ):
            decoder.tick = bar.update
            for batch, done in zip(batches, accumulate(most), strict=True):
                drawn = _generate(decoder, [rows[i] for i in batch], settings, seed, stops)
                for i, sample in zip(batch, drawn, strict=True):
                    out[i] = sample
                bar.update(done - bar.n)
            for _ in range(rounds - len(batches)):
                _generate(decoder, [Continuation("", 0, np.array(stops[:1]), 1)], settings, seed, stops)
        return out

    def layout(self) -> Facts:
        """Return {}: up to rounding, a sample does not depend on who draws it. So does ``dealt``."""
        return {}

    dealt = layout

    def sleep(self) -> None:
        """Does nothing: the sampler has no memory of its own."""

    def close(self) -> None:
        """Does nothing: the sampler has no process of its own."""


def _generate(
    decoder: Decoder,
    rows: list[Continuation],
    settings: SamplingSettings,
    seed: int,
    stops: tuple[int, ...],
) -> list[Sample]:
    limits = [row.max_tokens for row in rows]
    draws = [uniforms(seed, row.key, row.index, max(limits)) for row in rows]
    tokens, logprobs = decoder.decode(
        [row.ids for row in rows],
        limits,
        draws if settings.temperature > 0 else None,
        settings.temperature,
        settings.top_p,
        stops,
    )
    return [
        _ended(drawn, values, set(stops), row.max_tokens)
        for row, drawn, values in zip(rows, tokens.tolist(), logprobs, strict=True)
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
