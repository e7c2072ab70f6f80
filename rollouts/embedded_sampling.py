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
from models.distributed import World
from models.loading import load_sharded
from models.policy import Policy
from rollouts.engines import EmbeddedEngine
from rollouts.samplers import EmbeddedSampler
from rollouts.sampling import refuse_options
from rollouts.stop_strings import stop_strings_of


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
