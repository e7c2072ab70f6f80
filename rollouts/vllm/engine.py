"""The vLLM sampler of rounds, which runs beside rank 0. It takes the policy's weights, proves that it has
them, and samples."""

from __future__ import annotations

import gc
import json
import time
from functools import partial
from pathlib import Path

import torch

from common.files import write_whole
from common.worker_process import WorkerError
from data.batches import collate
from data.chat import Renderer
from data.types import Prompt, Sequence
from models.distributed import Ranks, World, ended_together, gather_objects, on_main
from models.export import config_json, whole_weights
from models.policy import Policy, causal_lm
from models.reference import score
from rollouts.probe import Probe, check_probe
from rollouts.samplers import Answered, Sample, SamplingSettings
from rollouts.sampling import Facts, write_weights
from rollouts.vllm.sampler import VllmSampler
from rollouts.vllm.transfer import HEAD, DeferredErrors, Transfer, WeightSource, chosen, make_transfer

PROBE_ROWS = 16
_PROBE = "probe.json"
_COARSENESS = ("float32", "float16", "bfloat16")


def probe_rows(prompts: list[Prompt], renderer: Renderer) -> list[Sequence]:
    """Return a fixed probe batch with the tokens of some prompts, each token but the first to be
    predicted."""
    rows = [renderer.prompt_ids(prompt) for prompt in prompts[:PROBE_ROWS]]
    return [Sequence(ids[:1], ids[1:]) for ids in rows if len(ids) > 1]


class TransferError(WorkerError):
    """Running engines could not be given the trainer's weights. ``died``: because one of them failed, and not
    because they have other weights afterwards."""

    died = False


class VllmEngine:
    """vLLM beside rank 0. Weights are sent by ``sampler.weight_transfer``; then engine and trainer score the
    probe, and must agree.

    An engine that dies while it samples is started again, at most once per round. Its weights are sent again,
    or read from where they were kept, and the prompts that were asked for are answered from the beginning.
    One that dies at another time is started again by the next hand-over.
    """

    def __init__(
        self,
        sampler: VllmSampler,
        policy: Policy,
        renderer: Renderer,
        world: World,
        probe: list[Sequence],
        trained_in: str,
    ) -> None:
        """``probe``: rows on which engine and trainer must agree. ``trained_in``: the trainer's compute
        dtype."""
        self.sampler, self.policy, self.renderer, self.world = sampler, policy, renderer, world
        self.probe, self.trained_in = probe, trained_in
        self.backend = chosen(sampler.config, world.device)
        self._probed: Probe | None = None
        self._said: list[list[float]] = []
        self._version, self._worked = 0, False
        self._proving, self._writing = 0.0, 0.0
        """seconds spent on the probe, and on writing files, in this hand-over"""
        self._kept: Path | None = None
        self._restarted = False
        self._source = WeightSource(partial(whole_weights, policy, getattr(torch, sampler.dtype)))
        self._client = DeferredErrors(sampler if world.is_main else None)
        self._transfer: Transfer | None = None
        self.ranks = Ranks()
        self._send_all = self.ranks.collective(self._send)
        self.sampler.transfers_by(None if self.backend == "disk" else self.backend)

    # -- weights -----------------------------------------------------------------------------------

    def publish(self, folder: Path, version: int, keep: bool) -> Facts:
        scoring = time.monotonic()
        self._said = self._scored()
        self._version, self._kept, self._restarted = version, None, False
        if self.sampler.config.shares_devices and self.world.device.type == "cuda":
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
        return self.ranks.on_main(
            lambda: {
                "weight_transfer": self.backend,
                "sampler_engines": self.sampler.engines,
                "sampler_workers": self.sampler.engine_workers,
                "write_seconds": self._writing,
                "load_seconds": time.monotonic() - start - self._writing - self._proving,
                "probe_seconds": start - scoring + self._proving,
                **self._probe_facts(),
            }
        )

    def _scored(self) -> list[list[float]]:
        """Return the trainer's log-probabilities of the probe, nats: [rows][tokens]. Every rank calls it."""
        # vLLM reports a prompt's tokens at 1
        with ended_together(), self.policy.at_temperature(1.0):
            return self._scores(self.probe)

    def _scores(self, rows: list[Sequence]) -> list[list[float]]:
        """Return the trainer's log-probabilities of completion tokens, nats. Every rank calls it."""
        scores = score(self.policy, collate(rows, self.world.device))
        return [values[: len(row.completion_ids)].tolist() for row, values in zip(rows, scores, strict=True)]

    def _probe_facts(self) -> Facts:
        assert self._probed is not None, "rank 0 has compared engine and trainer"
        return {"probe_largest": self._probed.largest, "probe_mean": self._probed.mean}

    def _hand_over(self, folder: Path, keep: bool) -> None:
        """Send the weights and prove that they arrived. Every rank calls it. Raises TransferError."""
        if (keep or self.backend == "disk") and self._kept is None:
            self._write(folder)
        self.ranks.on_main(self._give)

    def _another_way(self, error: TransferError) -> bool:
        """Switch to another way of sending weights if the first try failed, and return whether there is one.
        It is used from then on. Every rank calls it."""
        if self._worked or self.backend == "disk" or self.sampler.config.weight_transfer != "auto":
            return False
        self.backend = "disk"
        if self.world.is_main:
            print(
                f"{error}\nweights go through a folder on disk instead (sampler.weight_transfer)", flush=True
            )
        self.sampler.close()
        self._probed = None
        self.sampler.transfers_by(None)
        return True

    def _write(self, folder: Path) -> None:
        """Write the current weights to ``folder``, with the trainer's log-probabilities of the probe. Every
        rank calls it."""
        start, dtype = time.monotonic(), getattr(torch, self.sampler.dtype)
        write_weights(self.policy, self.renderer.tokenizer, folder, dtype)
        on_main(lambda: write_whole(folder / _PROBE, json.dumps(self._said)))
        self._kept, self._writing = folder, self._writing + time.monotonic() - start

    def _give(self) -> None:
        """Send the current weights, or those that were kept. Called on rank 0, inside
        ``ranks.on_main``."""
        if self.backend == "disk":
            assert self._kept is not None
            try:
                self.sampler.load(self._kept, self._version)
                self._prove(self._said)
            except WorkerError as error:
                raise self._failed("weight transfer by disk failed", error) from error
            return
        fresh = self.sampler.start(config_json(self.policy, getattr(torch, self.sampler.dtype)))
        try:
            without = frozenset[str]() if self._wants_head() else frozenset((HEAD,))
            self._client.version = str(self._version)
            said = self._send_all((fresh, without))
            if said is not None:
                raise WorkerError(said)
            self._client.check()
            self._prove(self._said)
        except (WorkerError, RuntimeError, ValueError, OSError) as error:
            raise self._failed(f"weight transfer by {self.backend} failed", error) from error

    def _failed(self, said: str, error: Exception) -> TransferError:
        failed = TransferError(f"{said}: {error}")
        failed.died = not self.sampler.running
        return failed

    def _wants_head(self) -> bool:
        """Return whether the engines take the output head. They are asked in any case: one that is dead or
        does not answer is noticed before the ranks begin to send."""
        own = self.sampler.own_head()
        return own or not causal_lm(self.policy.model).config.get_text_config().tie_word_embeddings

    def _send(self, asked: tuple[bool, frozenset[str]]) -> str | None:
        """Send the weights from every rank. ``asked``: whether the engines are not connected yet, and the
        names of weights that are not sent. Returns why the ranks could not connect, the same on all."""
        fresh, without = asked
        self._source.without = without
        if fresh or self._transfer is None:
            if self._transfer is not None:
                self._transfer.shutdown()  # the engines at its other end are gone
            self._transfer = None
            failure = None
            try:
                self._transfer = self._connected()
            except Exception as error:
                failure = f"{type(error).__name__}: {error}"
            for rank, said in enumerate(gather_objects(failure)):
                if said is not None:
                    return f"rank {rank}: {said}" if rank else said
        assert self._transfer is not None
        self._transfer.send_weights()
        return None

    def _connected(self) -> Transfer:
        made = make_transfer(
            self.backend,
            self._client,
            self._source,
            self.world,
            workers=self.sampler.engine_workers,
        )
        self._client.check()
        return made

    def _prove(self, trainer: list[list[float]]) -> None:
        """Raise WorkerError unless the engines' log-probabilities of the probe agree with the trainer's."""
        start = time.monotonic()
        for engine in self.sampler.logprobs(self.probe):
            probed = check_probe(engine, trainer, self._coarser, self._probed)
        self._probed, self._proving = probed, self._proving + time.monotonic() - start

    @property
    def _coarser(self) -> str:
        """The coarser dtype of the engine's and the trainer's."""
        return max(self.trained_in, self.sampler.dtype, key=_COARSENESS.index)

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
            return self.sampler.sample(prompts, n, settings, seed, answered)
        except WorkerError as error:
            if self._restarted or self.sampler.running:  # no engine failed
                raise
            self._restart(error)
            return self.sampler.sample(prompts, n, settings, seed, answered)

    def _restart(self, error: WorkerError) -> None:
        self._restarted = True
        self._give_up(error, "it is started again, and samples the round's prompts again")
        if self._kept is not None:
            self.sampler.load(self._kept, self._version)
            self._prove(json.loads((self._kept / _PROBE).read_text()))
        else:
            self._give()

    def _give_up(self, error: WorkerError, then: str) -> None:
        """Close the engines, of which one failed. Called on rank 0."""
        print(f"{error}\n{then}", flush=True)
        self.sampler.close()
        self._probed = None  # a new process has no older weights

    def sleep(self) -> None:
        try:
            self.sampler.sleep()
        except WorkerError as error:  # what it sampled is here already
            self._give_up(error, "it is started again when it is sent the next weights")

    def close(self) -> None:
        self.sampler.close()
