"""The sampler ``sampler=embedded``, which is transformers' own generation in the trainer's processes. Every
rank samples a share of the prompts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from config.schema import Config
from data.chat import Renderer
from data.types import Prompt
from models.distributed import Ranks, World, gather_objects
from models.loading import load_sharded
from models.policy import Policy
from rollouts.samplers import Answered, EmbeddedSampler, Sample, SamplingSettings
from rollouts.sampling import Facts, refuse_options, write_weights
from rollouts.stop_strings import stop_strings_of


class EmbeddedEngine:
    """The policy itself samples, every rank a share of the prompts. It already has the weights."""

    def __init__(self, sampler: EmbeddedSampler, world: World, dtype: torch.dtype) -> None:
        """``dtype``: the policy's compute dtype, in which kept weights are written."""
        self.sampler, self.world, self.dtype, self.ranks = sampler, world, dtype, Ranks()
        self._shares = self.ranks.collective(self._share)

    def publish(self, folder: Path, version: int, keep: bool) -> Facts:
        if keep:
            tokenizer = self.sampler.renderer.tokenizer
            write_weights(self.sampler.policy, tokenizer, folder, self.dtype)
        return {}

    def sample(
        self,
        prompts: list[Prompt],
        n: int,
        settings: SamplingSettings,
        seed: int,
        answered: Answered | None = None,
    ) -> list[list[Sample]]:
        """``answered`` is never called, because the ranks' answers arrive together."""
        shares = self._shares((prompts, n, settings, seed))
        return [shares[i % self.world.size][i // self.world.size] for i in range(len(prompts))]

    def _share(self, asked: tuple[list[Prompt], int, SamplingSettings, int]) -> list[list[list[Sample]]]:
        prompts, n, settings, seed = asked
        mine = prompts[self.world.rank :: self.world.size]
        return gather_objects(self.sampler.sample(mine, n, settings, seed))

    def sleep(self) -> None:
        """Does nothing: the engine has no memory of its own."""

    def close(self) -> None:
        """Does nothing: the engine has no process of its own."""


class EmbeddedSampling:
    """The kind of sampler in which the policy itself samples."""

    @classmethod
    def check(cls) -> None:
        """Does nothing: this sampler runs everywhere."""

    def __init__(self, config: Config, renderer: Renderer, world: World, log_dir: Path) -> None:
        refuse_options(config)
        self.stops = stop_strings_of(config, renderer)
        self.config, self.renderer, self.world = config, renderer, world
        self.rows = config.sampler.batch_size or config.model.eval_batch_size

    def engine(self, policy: Policy, prompts: list[Prompt]) -> EmbeddedEngine:
        several = self.world.size > 1
        device = self.world.device
        sampler = EmbeddedSampler(
            policy,
            self.renderer,
            device,
            batch_size=self.rows,
            synced=several,
            stops=self.stops,
        )
        return EmbeddedEngine(sampler, self.world, getattr(torch, self.config.model.dtype))

    @contextmanager
    def opened(self) -> Iterator[EmbeddedEngine]:
        policy, _ = load_sharded(self.config.model, self.world)
        yield self.engine(policy, [])

    def part(self, prompts: int, n: int) -> int:
        """Return as many prompts as fill one batch on every rank."""
        return max(1, self.rows * self.world.size // n)
