"""Who samples in a round, whatever the number of ranks: the embedded sampler on every rank's share, or vLLM
beside rank 0 (``rollouts.vllm_engine``). Rank 0 makes the round, and the others help (``models.ranks``)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import PreTrainedTokenizerBase

from common.worker_process import WorkerError
from data.types import Prompt
from models.distributed import World, gather_objects
from models.export import export, full_state
from models.policy import Policy
from models.ranks import Ranks, attempt, outcome
from rollouts.samplers import Answered, EmbeddedSampler, Sample, SamplingSettings

Facts = dict[str, Any]


class Engine(Protocol):
    """What rounds ask of a sampler, beside samples: to take the policy's weights."""

    ranks: Ranks
    """By which the other ranks help to make a round."""

    def publish(self, folder: Path, version: int, keep: bool) -> Facts:
        """Sample from the policy as it is now, from here on. Every rank calls it. ``folder``: for what has to
        be written; it may go once the round is sampled. ``keep``: the policy moves on meanwhile, so the
        weights have to be there for ``reload_weights``. Returns what is worth keeping of it. Raises
        WorkerError."""

    def reload_weights(self, folder: Path, version: int) -> None:
        """Sample from what ``publish`` kept in ``folder``, in a process that was killed since. Rank 0."""

    def sample(
        self,
        prompts: list[Prompt],
        n: int,
        settings: SamplingSettings,
        seed: int,
        answered: Answered | None = None,
    ) -> list[list[Sample]]:
        """``n`` answers to each prompt, in order. Rank 0, inside ``ranks.run_on_main``. ``answered`` may be
        told of a prompt's answers as soon as they are there."""

    def sleep(self) -> None:
        """Give accelerator memory back until the next ``publish``. Rank 0."""

    def close(self) -> None: ...


class EmbeddedEngine:
    """The policy itself samples, every rank a share of the prompts. It has the weights already."""

    def __init__(self, sampler: EmbeddedSampler, world: World, dtype: torch.dtype) -> None:
        """``dtype``: what the policy computes in, in which kept weights are written."""
        self.sampler, self.world, self.dtype, self.ranks = sampler, world, dtype, Ranks(world)
        self._shares = self.ranks.together(self._share)

    def publish(self, folder: Path, version: int, keep: bool) -> Facts:
        if keep:
            tokenizer = self.sampler.renderer.tokenizer
            write_weights(self.ranks, self.sampler.policy, tokenizer, folder, self.dtype)
        return {}

    def reload_weights(self, folder: Path, version: int) -> None:
        """The embedded sampler has only the weights of now: the schema lets it not sample ahead."""
        raise WorkerError(f"{folder} was not written by the embedded sampler")

    def sample(
        self,
        prompts: list[Prompt],
        n: int,
        settings: SamplingSettings,
        seed: int,
        answered: Answered | None = None,
    ) -> list[list[Sample]]:
        """``answered`` is told nothing: the ranks' answers come together."""
        shares = self._shares((prompts, n, settings, seed))
        return [shares[i % self.world.size][i // self.world.size] for i in range(len(prompts))]

    def _share(self, asked: tuple[list[Prompt], int, SamplingSettings, int]) -> list[list[list[Sample]]]:
        prompts, n, settings, seed = asked
        mine = prompts[self.world.rank :: self.world.size]
        return gather_objects(self.sampler.sample(mine, n, settings, seed))

    def sleep(self) -> None:
        """It has no memory of its own."""

    def close(self) -> None:
        """It has no process of its own."""


def write_weights(
    ranks: Ranks, policy: Policy, tokenizer: PreTrainedTokenizerBase, folder: Path, dtype: torch.dtype
) -> None:
    """The policy as it is now, as a model in ``folder``. Every rank calls it. Raises OSError on all."""
    state = full_state(policy)
    ranks.run_on_main(lambda: export(state, policy, tokenizer, folder, dtype))


class Prefetch:
    """Work that goes on in a thread of its own while the round before is trained on."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._done: tuple[Any, BaseException | None] = (None, None)
        self._thread = threading.Thread(target=self._run, args=(work,), daemon=True)
        self._thread.start()

    def _run(self, work: Callable[[], object]) -> None:
        self._done = attempt(work)

    def result(self) -> None:
        """Wait for it; raises what it raised."""
        self._thread.join()
        outcome(self._done)
