"""The interface of a kind of sampler, which its yaml names (``sampler._target_``), and of its engine, which
samples the rounds of a run on any number of ranks. No other code knows samplers by name.

The embedded sampler runs on every rank's share; vLLM runs beside rank 0 (``rollouts.vllm.engine``). Rank 0
makes the round, and the others help (``models.distributed``).
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import PreTrainedTokenizerBase

from common.errors import require
from common.imports import import_function
from config.schema import Config
from data.chat import Renderer
from data.types import Prompt
from models.distributed import Ranks, World, ended_together, on_main
from models.export import export, full_state, remove_unfinished
from models.policy import Policy
from rollouts.samplers import Answered, Sample, SamplingSettings

Facts = dict[str, Any]


class OpenSampler(Protocol):
    """A sampler that has its weights."""

    ranks: Ranks
    """The ranks, through which those above 0 help."""

    def sample(
        self,
        prompts: list[Prompt],
        n: int,
        settings: SamplingSettings,
        seed: int,
        answered: Answered | None = None,
    ) -> list[list[Sample]]:
        """Return ``n`` answers to each prompt, in order. Called on rank 0, inside ``ranks.on_main``.
        ``answered`` may be called with a prompt's answers as soon as they are there."""


class Engine(OpenSampler, Protocol):
    """The sampler interface that rounds use. Besides sampling, an engine takes over the policy's weights."""

    def publish(self, folder: Path, version: int, keep: bool) -> Facts:
        """Sample from the policy's current weights from now on. Every rank calls it. ``folder``: for files
        that have to be written; it may be deleted once the round is sampled. ``keep``: write the weights
        there in any case. Returns facts to record. Raises WorkerError."""

    def sleep(self) -> None:
        """Release accelerator memory until the next ``publish``. Called on rank 0."""

    def close(self) -> None: ...


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


def write_weights(
    policy: Policy, tokenizer: PreTrainedTokenizerBase, folder: Path, dtype: torch.dtype
) -> None:
    """Write the policy's current weights to ``folder``, within the run, as a model. Every rank calls it.
    Raises OSError on all ranks."""
    with ended_together():
        state = full_state(policy)

    def write() -> None:
        remove_unfinished(folder)
        export(state, policy, tokenizer, folder, dtype)

    on_main(write)
