"""A kind of sampler, as its yaml names it (``sampler._target_``): nothing else in the code knows samplers by
name."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from common.errors import require
from common.imports import import_function
from config.schema import Config
from data.chat import Renderer
from data.types import Prompt
from models.distributed import World
from models.policy import Policy
from models.ranks import Ranks
from rollouts.engines import Engine
from rollouts.samplers import Sample, SamplingSettings


class OpenSampler(Protocol):
    """A sampler with its weights. ``ranks`` and ``sample`` as of ``rollouts.engines.Engine``."""

    ranks: Ranks

    def sample(
        self, prompts: list[Prompt], n: int, settings: SamplingSettings, seed: int
    ) -> list[list[Sample]]: ...


class Sampling(Protocol):
    """Made as ``cls(config, renderer, world, log_dir)`` before any weights load. Every rank has one."""

    @classmethod
    def check(cls) -> None:
        """Raise ConfigError where this kind of sampler cannot run at all."""

    def engine(self, policy: Policy, prompts: list[Prompt]) -> Engine:
        """What samples the rounds of a run. ``prompts``: those of the run, for a probe."""
        ...

    def opened(self) -> AbstractContextManager[OpenSampler]:
        """The sampler with the weights of ``model``, outside of rounds. Raises ConfigError."""
        ...

    def part(self, prompts: int, n: int) -> int:
        """How many prompts, ``n`` answers each, are answered between two movements of a progress bar."""
        ...

    def close(self) -> None:
        """End what it started beside the engine and what ``opened`` gives."""


def make_sampling(config: Config, renderer: Renderer, world: World, log_dir: Path) -> Sampling:
    """The sampler that the settings name. What its processes print goes to ``log_dir``. Raises
    ConfigError."""
    made: Sampling = sampling_class(config)(config, renderer, world, log_dir)
    return made


def refuse_options(config: Config) -> None:
    """Raise ConfigError for ``sampler.options``, which a sampler without any would not read."""
    options = config.sampler.options
    require(not options, "sampler.options", options, f"sampler={config.sampler.name} takes none")


def sampling_class(config: Config) -> Any:
    """The class that ``sampler._target_`` names. Raises ConfigError if it cannot be had, or cannot run
    here."""
    found = import_function("sampler._target_", config.sampler._target_)
    found.check()
    return found
