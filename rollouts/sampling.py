"""The interface of a kind of sampler, which its yaml names (``sampler._target_``). No other code knows
samplers by name."""

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
from rollouts.engines import Engine, OpenSampler


class Sampling(Protocol):
    """One kind of sampler, made as ``cls(config, renderer, world, log_dir)`` before any weights load. Every
    rank has one."""

    @classmethod
    def check(cls) -> None:
        """Raise ConfigError if this kind of sampler cannot run at all."""

    def engine(self, policy: Policy, prompts: list[Prompt]) -> Engine:
        """Return the engine that samples the rounds of a run. ``prompts``: those of the run, for a probe."""
        ...

    def opened(self) -> AbstractContextManager[OpenSampler]:
        """Open the sampler with the weights of ``model``, for use outside rounds. Raises ConfigError."""
        ...

    def part(self, prompts: int, n: int) -> int:
        """Return how many of ``prompts`` prompts, with ``n`` answers each, to sample between two updates of a
        progress bar."""
        ...


def make_sampling(config: Config, renderer: Renderer, world: World, log_dir: Path) -> Sampling:
    """Return the sampler that the settings name. The output of its processes goes to ``log_dir``. Raises
    ConfigError."""
    made: Sampling = sampling_class(config)(config, renderer, world, log_dir)
    return made


def refuse_options(config: Config) -> None:
    """Raise ConfigError if there are ``sampler.options``, for a sampler that takes none and would not read
    them."""
    options = config.sampler.options
    require(not options, "sampler.options", options, f"sampler={config.sampler.name} takes none")


def sampling_class(config: Config) -> Any:
    """Return the class that ``sampler._target_`` names. Raises ConfigError if it cannot be imported, or
    cannot run here."""
    sampler_class = import_function("sampler._target_", config.sampler._target_)
    sampler_class.check()
    return sampler_class
