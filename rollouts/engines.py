"""The engines that sample the rounds of a run on any number of ranks. The embedded sampler runs on every
rank's share; vLLM runs beside rank 0 (``rollouts.vllm.engine``). Rank 0 makes the round, and the others help
(``models.ranks``)."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import PreTrainedTokenizerBase

from data.types import Prompt
from models.distributed import World, gather_objects
from models.export import export, full_state, remove_unfinished
from models.policy import Policy
from models.ranks import Ranks
from rollouts.samplers import Answered, EmbeddedSampler, Sample, SamplingSettings

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
        """Return ``n`` answers to each prompt, in order. Called on rank 0, inside ``ranks.run_on_main``.
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


class EmbeddedEngine:
    """The policy itself samples, every rank a share of the prompts. It already has the weights."""

    def __init__(self, sampler: EmbeddedSampler, world: World, dtype: torch.dtype) -> None:
        """``dtype``: the policy's compute dtype, in which kept weights are written."""
        self.sampler, self.world, self.dtype, self.ranks = sampler, world, dtype, Ranks(world)
        self._shares = self.ranks.collective(self._share)

    def publish(self, folder: Path, version: int, keep: bool) -> Facts:
        if keep:
            tokenizer = self.sampler.renderer.tokenizer
            write_weights(self.ranks, self.sampler.policy, tokenizer, folder, self.dtype)
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


def write_weights(
    ranks: Ranks, policy: Policy, tokenizer: PreTrainedTokenizerBase, folder: Path, dtype: torch.dtype
) -> None:
    """Write the policy's current weights to ``folder``, within the run, as a model. Every rank calls it.
    Raises OSError on all ranks."""
    with ranks.ended_together():
        state = full_state(policy)

    def write() -> None:
        remove_unfinished(folder)
        export(state, policy, tokenizer, folder, dtype)

    ranks.run_on_main(write)
