"""Who samples in a round, whatever the number of ranks: the embedded sampler on every rank's share, or vLLM
beside rank 0.

Rank 0 makes a round alone (``rollouts.round_builder``), as plain code without collectives; the others help it
to sample when it asks.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from common.files import write_whole
from common.worker_process import WorkerError
from data.batches import collate
from data.chat import Renderer
from data.types import Prompt, Sequence
from models.distributed import World, from_main, gather_objects
from models.export import export, full_state
from models.policy import Policy
from models.reference import score
from rollouts.probe import Probe, check_probe
from rollouts.samplers import EmbeddedSampler, Sample, SamplingSettings
from rollouts.vllm_sampler import VllmSampler

T = TypeVar("T")
Facts = dict[str, Any]

PROBE_ROWS = 16
_PROBE = "probe.json"
_COARSENESS = ("float32", "float16", "bfloat16")


class Engine(Protocol):
    """What rounds ask of a sampler, beside samples: to take the policy's weights, and to work for rank 0."""

    def publish(self, folder: Path, version: int) -> Facts:
        """Sample from the policy as it is now, from here on. Every rank calls it. ``folder``: for what has to
        be written; it may go once the round is sampled. Returns what is worth keeping of it. Raises
        WorkerError."""

    def reload_weights(self, folder: Path, version: int) -> None:
        """Sample from what ``publish`` wrote to ``folder`` in a process that was killed. Rank 0."""

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


def probe_rows(prompts: list[Prompt], renderer: Renderer) -> list[Sequence]:
    """A fixed probe batch: the tokens of some prompts, each but the first to be predicted."""
    rows = [renderer.prompt_ids(prompt) for prompt in prompts[:PROBE_ROWS]]
    return [Sequence(ids[:1], ids[1:]) for ids in rows if len(ids) > 1]


class EmbeddedEngine:
    """The policy itself samples, every rank a share of the prompts. There is nothing to publish."""

    def __init__(self, sampler: EmbeddedSampler, world: World) -> None:
        self.sampler, self.world = sampler, world

    def publish(self, folder: Path, version: int) -> Facts:
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


class VllmEngine:
    """vLLM beside rank 0. Weights go over as a folder; then both score the probe, and must agree."""

    def __init__(
        self,
        sampler: VllmSampler,
        policy: Policy,
        renderer: Renderer,
        world: World,
        probe: list[Sequence],
        trained_in: str,
    ) -> None:
        """``probe``: rows on which engine and trainer must agree; ``trained_in``: the trainer's compute
        dtype."""
        self.sampler, self.policy, self.renderer, self.world = sampler, policy, renderer, world
        self.probe, self.trained_in = probe, trained_in
        self._probed: Probe | None = None

    def publish(self, folder: Path, version: int) -> Facts:
        state = full_state(self.policy)
        rows = collate(self.probe, self.world.device)
        with self.policy.at_temperature(1.0):  # what vLLM says of a prompt's tokens
            scores = score(self.policy, rows)
        trainer = [
            values[: len(row.completion_ids)].tolist() for row, values in zip(self.probe, scores, strict=True)
        ]
        return self.run_on_main(lambda: self._load(state, trainer, folder, version))

    def _load(
        self, state: dict[str, torch.Tensor], trainer: list[list[float]], folder: Path, version: int
    ) -> Facts:
        start = time.monotonic()
        export(state, self.policy, self.renderer.tokenizer, folder, getattr(torch, self.sampler.dtype))
        write_whole(folder / _PROBE, json.dumps(trainer))
        written = time.monotonic()
        self.reload_weights(folder, version)
        assert self._probed is not None
        return {
            "write_seconds": written - start,
            "load_seconds": time.monotonic() - written,
            "probe_largest": self._probed.largest,
            "probe_mean": self._probed.mean,
        }

    def reload_weights(self, folder: Path, version: int) -> None:
        trainer = json.loads((folder / _PROBE).read_text())
        self.sampler.load(folder, version)
        dtype = max(self.trained_in, self.sampler.dtype, key=_COARSENESS.index)
        for engine in self.sampler.logprobs(self.probe):
            probed = check_probe(engine, trainer, dtype, self._probed)
        self._probed = probed

    def run_on_main(self, work: Callable[[], T]) -> T:
        return outcome(from_main(attempt(work) if self.world.is_main else None))

    def sample(
        self, prompts: list[Prompt], n: int, settings: SamplingSettings, seed: int
    ) -> list[list[Sample]]:
        return self.sampler.sample(prompts, n, settings, seed)

    def sleep(self) -> None:
        self.sampler.sleep()

    def close(self) -> None:
        self.sampler.close()


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
