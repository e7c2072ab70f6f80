"""vLLM's engines, which run in separate processes across rounds and load each round's weights in place.

Weights arrive through vLLM's weight transfer (``rollouts.vllm.transfer``), or as a Hugging Face folder of
safetensors. They have a version, which the engine returns with every answer. Prompts and samples are token
ids. The trainer compares log-probabilities after every hand-over (``rollouts.probe``) and recomputes those of
the samples; the engine's are a diagnostic.

On GPUs the engine shares the trainer's devices (``sleep`` releases the memory until the next weights) or has
its own (``sampler.devices``). Several copies (``sampler.data_parallel``) share the work, and so do the nodes
(``rollouts.vllm.nodes``). The tests run the CPU engine: sleep, tensor parallelism and separate devices follow
vLLM's documented interface.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from common.worker_process import WorkerError, WorkerProcess, replies_of
from config.schema import Config
from config.schema_sampler import SamplerConfig
from data.types import Sequence
from rollouts.vllm.messages import EngineOptions, Generated, GenerateRequest, TokenRow
from rollouts.vllm.options import engine_environment

WORKER = "rollouts.vllm.worker"


class Engines:
    """One node's engine, or ``data_parallel`` of them, started by the first ``load``. The caller closes it.

    Equal calls to one engine give equal samples. Rounding may depend on what else is in flight, so in another
    batch, or on another engine, a sample may diverge at a near tie.
    """

    def __init__(
        self, config: Config, sampler: SamplerConfig, log_dir: Path, first: int = 0, beside: int = 1
    ) -> None:
        """``sampler``: the section of ``config`` with the number of engines (``options.with_engines``).
        ``log_dir``: for the engines' output. ``first``: the number of the first of them among those of all
        nodes. ``beside``: number of nodes that share this machine."""
        self.config, self.log_dir, self.first, self.beside = sampler, log_dir, first, beside
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

    def generate(self, shares: list[list[GenerateRequest]]) -> list[list[Generated]]:
        """Return the samples of each engine's requests, in order. Raises WorkerError."""
        self._require_weights()
        drawn = self._ask("generate", [(requests,) for requests in shares], self.config.timeout)
        counts = [(len(samples), len(requests)) for samples, requests in zip(drawn, shares, strict=True)]
        if any(there != wanted for there, wanted in counts):
            raise WorkerError(f"the engines drew (samples, of so many): {counts}")
        return drawn

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
        environment = engine_environment(self.config, replica, os.environ, self.beside)
        log = self.log_dir / f"vllm-{self.first + replica}.log"
        return WorkerProcess(WORKER, log=log, env=environment)

    def _ask_all(self, method: str, *arguments: Any) -> list[Any]:
        return self._ask(method, [arguments] * len(self._workers), self.config.timeout)

    def _ask(self, method: str, arguments: list[tuple[Any, ...]], timeout: float) -> list[Any]:
        """Send one request to each engine at once, and return the answers in order, which must all come from
        the weights of ``self.version``."""
        with self._closed_on_failure():
            for worker, each in zip(self._workers, arguments, strict=True):
                worker.send(method, *each)
            replies = replies_of(self._workers, timeout)
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
