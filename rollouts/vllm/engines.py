"""vLLM's engines, which run in separate processes across rounds and load each round's weights in place.

Weights arrive through vLLM's weight transfer (``rollouts.vllm.transfer``), or as a Hugging Face folder of
safetensors. They have a version, which the engine returns with every answer. Prompts and samples are token
ids. The trainer compares log-probabilities after every hand-over (``rollouts.probe``) and recomputes those of
the samples; the engine's are a diagnostic.

On GPUs the engine shares the trainer's devices (``sleep`` releases the memory until the next weights) or has
its own (``sampler.devices``). Several copies (``sampler.data_parallel``) share the work. The tests run the
CPU engine: sleep, tensor parallelism and separate devices follow vLLM's documented interface.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from common.worker_process import WorkerError, WorkerProcess, replies_of
from config.schema import Config
from config.schema_sampler import SamplerConfig
from data.chat import Renderer
from data.types import Prompt, Sequence
from rollouts.samplers import Answered, Continuation, Sample, SamplingSettings, rows_of
from rollouts.stop_strings import stop_strings_of
from rollouts.vllm.messages import EngineOptions, Generated, GenerateRequest, TokenRow
from rollouts.vllm.options import engine_environment

WORKER = "rollouts.vllm.worker"


class Engines:
    """One engine, or ``data_parallel`` of them, started by the first ``load``. The caller closes it.

    A sample's random numbers depend on its prompt, its index and the seed, so equal calls to one engine give
    equal samples. Rounding may depend on what else is in flight, so in another batch, or on another engine, a
    sample may diverge at a near tie.
    """

    def __init__(self, config: Config, sampler: SamplerConfig, renderer: Renderer, log_dir: Path) -> None:
        """``sampler``: the section of ``config`` with the number of engines (``options.with_engines``).
        ``log_dir``: for the engines' output. Raises ConfigError."""
        self.config, self.renderer, self.log_dir = sampler, renderer, log_dir
        self.stops = stop_strings_of(config, renderer)
        self.version: int | None = None
        """version of the weights that samples would come from; None before the first load and while asleep"""
        self.options = EngineOptions(
            dtype=sampler.dtype or config.model.dtype,
            max_length=config.model.max_length,
            tensor_parallel=sampler.tensor_parallel,
            gpu_memory_utilization=sampler.gpu_memory_utilization,
            max_sequences=sampler.batch_size,
            enforce_eager=sampler.enforce_eager,
            sleeps=sampler.shares_devices,
            temperature=config.model.logit_temperature,
            cpu_kv_cache_gb=sampler.cpu_kv_cache_gb,
        )
        self._workers: list[WorkerProcess] = []
        self._connected = False
        self.sizes = [sampler.tensor_parallel] * sampler.copies
        """number of each engine's processes with a part of the model"""

    @property
    def running(self) -> bool:
        """Whether there are engines."""
        return bool(self._workers)

    def transfers_by(self, backend: str | None) -> None:
        """Make engines that start from now on take weights by this backend of vLLM's; None: from folders
        alone."""
        self.options = replace(self.options, transfer=backend)

    def load(self, folder: Path, version: int) -> None:
        """Load the weights of a Hugging Face folder (config.json, *.safetensors) in place, waking up first if
        asleep. The engines start at the first call, and at the first after a failure. Raises WorkerError; no
        engine is left then."""
        path = str(folder.resolve())
        self.version = version
        if self._workers:
            self._ask_all("load", path, str(version))
        else:
            self._start(path, str(version))

    def start(self, model_config: str) -> bool:
        """Ensure that there are engines that can be sent weights. Returns True if they are not connected to
        the trainer, as after any start, and ``init_weight_transfer_engine`` must come first.
        ``model_config``: the text of the model's config.json. Raises WorkerError; no engine is left then."""
        if not self._workers:
            self.version, self.options = None, replace(self.options, model_config=model_config)
            self._start(None, "")
        return not self._connected

    def _start(self, folder: str | None, version: str) -> None:
        self._connected = False
        with self._closed_on_failure():
            for replica in range(len(self.sizes)):
                self._workers.append(self._worker(replica))
        start = (self.options, folder, version)
        self._ask("start", [start] * len(self._workers), self.config.start_timeout)

    def needs_head(self) -> bool:
        """Return whether the engines need the output head by name, even if it is tied to the embeddings."""
        return bool(self._ask_all("needs_head")[0])

    # The calls of vLLM's trainer engines (rollouts.vllm.transfer.Client). All engines work at once.

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """If there is a ``rank_offset``, it is the first engine's. The workers of each other engine follow
        those before."""
        infos = [dict(init_info) for _ in self._workers]
        if "rank_offset" in init_info:
            for k, info in enumerate(infos):
                info["rank_offset"] += sum(self.sizes[:k])
        self._ask("init_weight_transfer_engine", [(info,) for info in infos], self.config.start_timeout)
        self._connected = True

    def start_weight_update(self) -> None:
        self.version = None
        self._ask_all("start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        self._ask_all("update_weights", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.version = int(weight_version or 0)
        self._ask_all("finish_weight_update", str(self.version))

    def sample(
        self,
        prompts: list[Prompt],
        n: int,
        settings: SamplingSettings,
        seed: int,
        answered: Answered | None = None,
    ) -> list[list[Sample]]:
        """Return ``n`` answers to each prompt, with the engine's log-probabilities. ``answered`` is called
        with a prompt's answers while others are still drawn, unless ``stops`` ends them. Raises
        DataError if a prompt cannot be rendered, and WorkerError."""
        if self.stops is not None:
            return self.stops.sample(self.draw, prompts, n, settings, seed, synced=False)
        rows = rows_of(self.renderer, prompts, n, settings)
        samples = self.draw(rows, settings, seed, self.renderer.stop_token_ids, n, answered)
        return [samples[i : i + n] for i in range(0, len(samples), n)]

    def draw(
        self,
        rows: list[Continuation],
        settings: SamplingSettings,
        seed: int,
        stops: tuple[int, ...],
        together: int = 1,
        answered: Answered | None = None,
    ) -> list[Sample]:
        """Return a sample for each row, which ends with one of ``stops`` or at the row's own ``max_tokens``.
        ``together``: number of rows of one prompt; one engine draws them all, and ``answered`` is called once
        for them. Raises WorkerError."""
        requests = [
            GenerateRequest(
                row.ids.tolist(),
                settings.temperature,
                settings.top_p,
                row.max_tokens,
                stops,
                sample_seed(seed, row.key, row.index),
            )
            for row in rows
        ]
        # Each engine gets consecutive rows, because the samples of a prompt share its part of the KV cache.
        engines, prompts = len(self.sizes), len(rows) // together
        bounds = [prompts * k // engines * together for k in range(engines + 1)]
        self._require_weights()
        says = says_logprobs(settings, self.options.temperature)
        drawn: list[Sample | None] = [None] * len(rows)

        def take(engine: int, generated: list[tuple[int, Generated]]) -> None:
            for place, each in generated:
                at = bounds[engine] + place
                drawn[at] = Sample(each.token_ids, each.finished, each.logprobs if says else ())
                first = at // together * together
                samples = [sample for sample in drawn[first : first + together] if sample is not None]
                if answered is not None and len(samples) == together:
                    answered(first // together, samples)

        self._ask("generate", [(requests[i:j],) for i, j in pairwise(bounds)], self.config.timeout, part=take)
        row_samples = [sample for sample in drawn if sample is not None]
        if len(row_samples) != len(rows):
            raise WorkerError(f"the engines drew {len(row_samples)} samples of {len(rows)}")
        return row_samples

    def logprobs(self, rows: list[Sequence]) -> list[list[list[float]]]:
        """Return each engine's log-probabilities of the completion tokens, nats: [engines][rows][tokens].

        Rows must be shorter than max_length, because an engine needs room for one more token. Raises
        WorkerError.
        """
        tokens: list[TokenRow] = [[*row.prompt_ids.tolist(), *row.completion_ids.tolist()] for row in rows]
        self._require_weights()
        answers = self._ask_all("logprobs", tokens)
        return [
            [values[len(row.prompt_ids) - 1 :] for row, values in zip(rows, answer, strict=True)]
            for answer in answers
        ]

    def sleep(self) -> None:
        """Release the GPU's memory until the next load if it is shared with the trainer; else do nothing.
        Raises WorkerError."""
        if self._workers and self.config.shares_devices:
            self.version = None
            self._ask_all("sleep")

    def close(self) -> None:
        """End the engines."""
        for worker in self._workers:
            worker.close()
        self._workers, self.version, self._connected = [], None, False

    def _require_weights(self) -> None:
        if self.version is None:
            raise WorkerError(
                "the vLLM sampler has no weights (never given any, asleep, or closed by a failure): call "
                "load first"
            )

    def _worker(self, replica: int) -> WorkerProcess:
        environment = engine_environment(self.config, replica, os.environ)
        return WorkerProcess(WORKER, log=self.log_dir / f"vllm-{replica}.log", env=environment)

    def _ask_all(self, method: str, *arguments: Any) -> list[Any]:
        return self._ask(method, [arguments] * len(self._workers), self.config.timeout)

    def _ask(
        self,
        method: str,
        arguments: list[tuple[Any, ...]],
        timeout: float,
        part: Callable[[int, Any], None] | None = None,
    ) -> list[Any]:
        """Send one request to each engine at once, and return the answers in order, which must all come from
        the weights of ``self.version``. ``part`` is called with (index of the engine, report) before its
        answer."""
        with self._closed_on_failure():
            for worker, each in zip(self._workers, arguments, strict=True):
                worker.send(method, *each)
            replies = replies_of(self._workers, timeout, part)
            versions = [version for version, _ in replies]
            wanted = "" if self.version is None else str(self.version)
            if any(version != wanted for version in versions):
                raise WorkerError(f"the engines answered from weights of version {versions}, not {wanted!r}")
            return [value for _, value in replies]

    @contextmanager
    def _closed_on_failure(self) -> Iterator[None]:
        """Close the engines after an error. Otherwise an answer left in a pipe could be taken for the answer
        to a later request."""
        try:
            yield
        except BaseException:
            self.close()
            raise


def says_logprobs(settings: SamplingSettings, temperature: float) -> bool:
    """Return whether vLLM reports the policy's log-probabilities of tokens at this temperature. It reports
    those before it divides by the sampling temperature and cuts the support, or those after both. So those at
    1 are always available, and others only if it samples at that temperature from the whole support."""
    return temperature == 1 or (settings.temperature == temperature and settings.top_p == 1)


def sample_seed(seed: int, prompt_id: str, index: int) -> int:
    """Return 63 bits. A sample's random numbers depend on its prompt and index, and not on its place in a
    batch."""
    return (
        int.from_bytes(hashlib.blake2b(f"{seed}/{prompt_id}/{index}".encode(), digest_size=8).digest()) >> 1
    )
