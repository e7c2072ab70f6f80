"""How a round's weights reach the engines of all nodes, and the proof that they did."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from common.worker_process import WorkerError
from data.batches import collate
from data.chat import Renderer
from data.types import Prompt, Sequence
from models.distributed import ended_together, gather_objects
from models.export import config_json, whole_weights
from models.policy import Policy, causal_lm
from models.reference import score
from rollouts.probe import Probe, check_probe
from rollouts.samplers import Facts, write_weights
from rollouts.vllm.folders import HEAD, place_of, write_model
from rollouts.vllm.nodes import Asked, Failures, NodeError, Nodes, raise_any
from rollouts.vllm.transfer import DeferredErrors, Transfer, WeightSource, chosen, make_transfer

PROBE_ROWS = 16
_COARSENESS = ("float32", "float16", "bfloat16")


class TransferError(NodeError):
    """Running engines could not be given the trainer's weights; ``died`` is False where they have other
    weights afterwards."""


@dataclass(frozen=True)
class Sending:
    """A request of rank 0 to all ranks to send weights."""

    nodes: frozenset[int]
    """those whose engines get them"""
    unconnected: frozenset[int]
    """those of them with engines that have just been started"""
    without: frozenset[str]
    """names of weights that are not sent"""
    version: int


class HandOver:
    """Hands the policy's weights over to the engines of all nodes, by ``sampler.weight_transfer``. Then
    engines and trainer score the probe, and must agree.

    Every rank has an instance. An engine that died before a hand-over, or dies in it, is started again."""

    def __init__(self, nodes: Nodes, policy: Policy, renderer: Renderer, prompts: list[Prompt]) -> None:
        """``prompts``: those of the run, for the probe."""
        self.nodes, self.world, self.policy, self.renderer = nodes, nodes.world, policy, renderer
        ids = [renderer.prompt_ids(prompt) for prompt in prompts[:PROBE_ROWS]]
        self.probe = [Sequence(row[:1], row[1:]) for row in ids if len(row) > 1]
        """rows on which engines and trainer must agree, each token but the first to be predicted"""
        engines = nodes.engines
        self.backend = chosen(engines.config, self.world.device)
        """the way by which weights are sent"""
        self.dtype = getattr(torch, engines.options.dtype)
        self.tied = bool(causal_lm(policy.model).config.get_text_config().tie_word_embeddings)
        self._source = WeightSource(partial(whole_weights, policy, self.dtype))
        self._client = DeferredErrors(engines if self.world.is_leader else None)
        self._transfer: Transfer | None = None
        self._send_all = nodes.ranks.collective(self._send)
        self._write_all = nodes.ranks.collective(self._write)
        self._load: Asked[tuple[Path | None, int], None] = nodes.request(self._loaded)
        self._probed: dict[int, Probe] = {}
        """each node's last probe since its engines were started"""
        self._scores: list[list[float]] = []
        """the trainer's log-probabilities of the probe, nats"""
        self._version, self._worked = 0, False
        self._folder, self._kept = Path(), False
        self._written: Path | None = None
        """where this rank has written the weights for its node"""
        engines.transfers_by(None if self.backend == "disk" else self.backend)

    def publish(self, folder: Path, version: int, keep: bool) -> Facts:
        """Give all engines the policy's weights (``Sampler.publish``). Every rank calls it."""
        self._scores = self._scored()
        self._version, self._folder, self._kept = version, folder, False
        if self.nodes.engines.config.shares_devices and self.world.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()  # the engine uses this memory when it wakes up
        if keep:
            write_weights(self.policy, self.renderer.tokenizer, folder, self.dtype)
            self._kept = True
        replaceable = self._worked
        while True:
            try:
                self.nodes.ranks.on_main(partial(self.give, self.nodes.every))
                break
            except TransferError as error:
                if replaceable and error.died:  # since the last hand-over, or in this one
                    replaceable = False
                    self.give_up(error, "it is started again")
                elif not self._another_way(error):
                    raise
        self._worked = True
        return self.nodes.ranks.on_main(self._facts)

    def _facts(self) -> Facts:
        """Return what the round's record says of the hand-over. Called on rank 0."""
        return {
            "weight_transfer": self.backend,
            "sampler_nodes": len(self.nodes.every),
            "sampler_engines": self.nodes.engines_of_all,
            "probe_largest": max(probe.largest for probe in self._probed.values()),
            "probe_mean": max(probe.mean for probe in self._probed.values()),
        }

    def _scored(self) -> list[list[float]]:
        """Return the trainer's log-probabilities of the probe, nats: [rows][tokens]. Every rank calls it."""
        # vLLM reports a prompt's tokens at 1
        with ended_together(), self.policy.at_temperature(1.0):
            scores = score(self.policy, collate(self.probe, self.world.device))
        rows = zip(self.probe, scores, strict=True)
        return [values[: len(row.completion_ids)].tolist() for row, values in rows]

    def give_up(self, error: WorkerError, then: str, nodes: Collection[int] = ()) -> None:
        """Say that engines failed, which are closed already, and what happens ``then``. ``nodes``: theirs;
        (): this is not known. New processes have no older weights."""
        if self.world.is_main:
            print(f"{error}\n{then}", flush=True)
        for node in nodes or self.nodes.every:
            self._probed.pop(node, None)

    def _another_way(self, error: TransferError) -> bool:
        """Switch to another way of sending weights if the first try failed, and return whether there is one.
        It is used from then on. Every rank calls it."""
        if self._worked or self.backend == "disk" or self.nodes.engines.config.weight_transfer != "auto":
            return False
        self.backend = "disk"
        self.give_up(error, "weights go through a folder on disk instead (sampler.weight_transfer)")
        self.nodes.engines.close()
        self.nodes.engines.transfers_by(None)
        return True

    # -- what rank 0 requests ----------------------------------------------------------------------

    def give(self, nodes: Collection[int]) -> None:
        """Give the engines of these nodes the weights of this hand-over, which the policy still has. Called
        on rank 0, inside ``ranks.on_main``. Raises TransferError."""
        try:
            if self.backend == "disk":
                self._give_by_folder(nodes)
            else:
                self._give_by_transfer(nodes)
            self._prove(nodes)
        except (WorkerError, RuntimeError, ValueError, OSError) as error:
            failed = TransferError(f"weight transfer by {self.backend} failed: {error}")
            failed.died = isinstance(error, NodeError) and error.died
            raise failed from error

    def _give_by_folder(self, nodes: Collection[int]) -> None:
        if not self._kept:
            raise_any(self._write_all((self._folder, frozenset(nodes))))
        self.nodes.all(self._load, (self._folder if self._kept else None, self._version), nodes)

    def _give_by_transfer(self, nodes: Collection[int]) -> None:
        started = self.nodes.all(self.nodes.start, config_json(self.policy, self.dtype), nodes)
        fresh = frozenset(node for node in nodes if started[node])
        # asked in any case: an engine that is dead or does not answer is noticed before the ranks send
        takes_head = any(self.nodes.all(self.nodes.needs_head, None, nodes).values())
        without = frozenset((HEAD,)) if self.tied and not takes_head else frozenset[str]()
        raise_any(self._send_all(Sending(frozenset(nodes), fresh, without, self._version)))

    def _prove(self, nodes: Collection[int]) -> None:
        """Raise WorkerError unless the engines' log-probabilities of the probe agree with the trainer's."""
        dtypes = (self.nodes.config.model.dtype, self.nodes.engines.options.dtype)
        coarser = max(*dtypes, key=_COARSENESS.index)
        for node, of_engines in self.nodes.all(self.nodes.logprobs, self.probe, nodes).items():
            for engine in of_engines:
                probed = check_probe(engine, self._scores, coarser, self._probed.get(node))
            self._probed[node] = probed

    # -- what every rank does ----------------------------------------------------------------------

    def _send(self, request: Sending) -> Failures:
        """Send the weights from every rank, which go through them in step. Returns why nodes failed, the same
        on all ranks."""
        self._source.without, self._client.version = request.without, str(request.version)
        self._client.silent = self.world.node not in request.nodes
        failures = self._failures(self._connect(request.unconnected)) if request.unconnected else {}
        if not failures:
            assert self._transfer is not None
            self._transfer.send_weights()
            failures = self._failures(self.nodes.failure_of(self._client.check))
        return failures

    def _connect(self, nodes: frozenset[int]) -> NodeError | None:
        """Connect this rank with the engines of its node if that is one of ``nodes``. Returns why it could
        not."""
        largest = self._source.largest() if self.backend == "ipc" else 0
        if self.world.node not in nodes:
            return None
        if self._transfer is not None:
            self._transfer.shutdown()  # the engines at its other end are gone
            self._transfer = None

        def connect() -> None:
            rank, workers = self.world.ranks_of_node.index(self.world.rank), sum(self.nodes.engines.sizes)
            self._transfer = make_transfer(self.backend, self._client, self._source, rank, workers, largest)
            self._client.check()

        return self.nodes.failure_of(connect)

    def _failures(self, mine: NodeError | None) -> Failures:
        """Return each node's first failure, from those of all ranks."""
        failures: Failures = {}
        for rank, failure in enumerate(gather_objects(mine)):
            if failure is not None:
                failures.setdefault(self.world.nodes[rank] if self.world.nodes else 0, failure)
        return failures

    def _write(self, request: tuple[Path, frozenset[int]]) -> Failures:
        """Write the weights on the leaders of some nodes, while every rank goes through them. Returns why
        nodes failed."""
        folder, nodes = request
        # A tied head is left out, as in a model's own files; an engine that needs it adds it.
        self._source.without = frozenset((HEAD,)) if self.tied else frozenset()
        size = sum(parameter.numel() for parameter in self.policy.parameters()) * self.dtype.itemsize
        if not (self.world.is_leader and self.world.node in nodes):
            for _ in self._source:
                pass
            return self._failures(None)
        self._written = place = place_of(folder, self.world.node, size)
        config = config_json(self.policy, self.dtype)
        return self._failures(self.nodes.failure_of(lambda: write_model(self._source, config, place)))

    def _loaded(self, request: tuple[Path | None, int]) -> None:
        """Load the weights on a leader: those in a folder that all nodes see, or those that it has written,
        which are removed then."""
        kept, version = request
        folder = kept or self._written
        assert folder is not None
        try:
            self.nodes.engines.load(folder, version)
        finally:
            self.remove_written()

    def remove_written(self) -> None:
        """Remove what this rank has written for its node."""
        if self._written is not None:
            shutil.rmtree(self._written, ignore_errors=True)
            self._written = None
