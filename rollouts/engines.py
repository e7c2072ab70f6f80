"""Who samples in a round, whatever the number of ranks: the embedded sampler on every rank's share, or vLLM
beside rank 0 (``rollouts.vllm_engine``).

Rank 0 makes a round alone (``rollouts.round_builder``), as plain code without collectives; the others help it
to sample when it asks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar

from common.worker_process import WorkerError
from data.types import Prompt
from models.distributed import World, from_main, gather_objects
from rollouts.samplers import EmbeddedSampler, Sample, SamplingSettings

T = TypeVar("T")
Facts = dict[str, Any]


class Engine(Protocol):
    """What rounds ask of a sampler, beside samples: to take the policy's weights, and to work for rank 0."""

    def publish(self, folder: Path, version: int, keep: bool) -> Facts:
        """Sample from the policy as it is now, from here on. Every rank calls it. ``folder``: for what has to
        be written; it may go once the round is sampled. ``keep``: the policy moves on meanwhile, so the
        weights have to be there for ``reload_weights``. Returns what is worth keeping of it. Raises
        WorkerError."""

    def reload_weights(self, folder: Path, version: int) -> None:
        """Sample from what ``publish`` kept in ``folder``, in a process that was killed since. Rank 0."""

    def run_on_main(self, work: Callable[[], T]) -> T:
        """What rank 0's ``work`` gives, or raises, on every rank; ``work`` may call ``sample``. Every rank
        calls it."""

    def sample(
        self, prompts: list[Prompt], n: int, settings: SamplingSettings, seed: int
    ) -> list[list[Sample]]:
        """``n`` answers to each prompt, in order. Rank 0, inside ``run_on_main``."""

    def sleep(self) -> None:
        """Give accelerator memory back until the next ``publish``. Rank 0."""

    def close(self) -> None: ...


class EmbeddedEngine:
    """The policy itself samples, every rank a share of the prompts. There is nothing to publish."""

    def __init__(self, sampler: EmbeddedSampler, world: World) -> None:
        self.sampler, self.world = sampler, world

    def publish(self, folder: Path, version: int, keep: bool) -> Facts:
        return {}

    def reload_weights(self, folder: Path, version: int) -> None:
        """The embedded sampler has only the weights of now: the schema lets it not sample ahead."""
        raise WorkerError(f"{folder} was not written by the embedded sampler")

    def run_on_main(self, work: Callable[[], T]) -> T:
        if not self.world.is_main:
            return outcome(self._help())
        done = attempt(work)
        from_main(("done", done))
        return outcome(done)

    def _help(self) -> Any:
        """Sample whenever rank 0 does, until it has done its work."""
        while True:
            kind, value = from_main(None)
            if kind == "done":
                return value
            self._share(*value)

    def sample(
        self, prompts: list[Prompt], n: int, settings: SamplingSettings, seed: int
    ) -> list[list[Sample]]:
        from_main(("sample", (prompts, n, settings, seed)))
        shares = self._share(prompts, n, settings, seed)
        return [shares[i % self.world.size][i // self.world.size] for i in range(len(prompts))]

    def _share(
        self, prompts: list[Prompt], n: int, settings: SamplingSettings, seed: int
    ) -> list[list[list[Sample]]]:
        mine = prompts[self.world.rank :: self.world.size]
        return gather_objects(self.sampler.sample(mine, n, settings, seed))

    def sleep(self) -> None:
        """It has no memory of its own."""

    def close(self) -> None:
        """It has no process of its own."""


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


def attempt(work: Callable[[], T]) -> tuple[T | None, BaseException | None]:
    """(what ``work`` gives, what it raises): to be told to other ranks, which would wait for ever if rank 0
    just left."""
    try:
        return work(), None
    except BaseException as error:
        return None, error


def outcome(done: tuple[Any, BaseException | None]) -> Any:
    """Give or raise what ``attempt`` has."""
    value, error = done
    if error is not None:
        raise error
    return value
