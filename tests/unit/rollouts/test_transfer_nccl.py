"""A hand-over by NCCL to an engine that refuses it or dies: with a stand-in for vLLM's trainer engine, whose
broadcasts wait for their receivers."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from common.worker_process import WorkerError
from rollouts.vllm.transfer import DeferredErrors, WeightSource, stoppable

WEIGHTS = {f"model.layers.{i}.weight": torch.full((2,), float(i)) for i in range(6)}
HANG = 20.0
"""Seconds that only a hang takes."""


class Group:
    """A communicator: a broadcast waits until the engine receives, or until the group is aborted."""

    def __init__(self) -> None:
        self.received, self.aborted = threading.Semaphore(0), threading.Event()
        self.sent: list[float] = []

    def destroy(self) -> None:
        self.aborted.set()
        self.received.release()

    def broadcast(self, tensor: torch.Tensor) -> None:
        if self.aborted.is_set():
            return  # as vLLM's does
        assert self.received.acquire(timeout=HANG), "nobody receives"
        if self.aborted.is_set():
            raise RuntimeError("NCCL error: unhandled system error")
        self.sent.append(float(tensor[0]))


class Trainer:
    """vLLM 0.32's ``NCCLTrainerWeightTransferEngine``, as far as this project is concerned with it."""

    def __init__(self, client: DeferredErrors, source: WeightSource, group: Group | None) -> None:
        self.client, self.source, self.model_update_group = client, source, group
        self.is_sender = group is not None

    def send_weights(self) -> None:
        meta = self.source.metadata()
        if not self.is_sender:
            self._broadcast(self.source, meta)
            return
        self.client.start_weight_update()
        requests = ThreadPoolExecutor(max_workers=1)
        try:
            future = requests.submit(self.client.update_weights, {})
            if future.done():
                future.result()
            self._broadcast(self.source, meta)
            future.result()
        finally:
            requests.shutdown(wait=False)
        self.client.finish_weight_update()

    def _broadcast(self, source, meta) -> None:
        if not self.is_sender:
            for _ in source:
                pass
            return
        for _, tensor in source:
            self.model_update_group.broadcast(tensor)


class Engine:
    """An engine that fails at a call: at once, or after it has received some of the weights."""

    def __init__(self, group: Group, fails: str | None = None, after: int = 0) -> None:
        self.group, self.fails, self.after = group, fails, after
        self.calls: list[str] = []

    def init_weight_transfer_engine(self, info) -> None: ...

    def start_weight_update(self) -> None:
        self._called("start")

    def update_weights(self, info) -> None:
        self._called("update")
        self.group.received.release(len(WEIGHTS))

    def finish_weight_update(self, version=None) -> None:
        self._called("finish")

    def _called(self, name: str) -> None:
        self.calls.append(name)
        if name == self.fails:
            self.group.received.release(self.after) if self.after else None
            raise WorkerError("the engine is gone")


def sent(fails: str | None = None, after: int = 0) -> tuple[Group, Engine, DeferredErrors, list[str]]:
    """Send the weights, and return also the names that were gone through, in order."""
    gone_through: list[str] = []
    source = WeightSource(lambda: ((n, t, gone_through.append(n))[:2] for n, t in WEIGHTS.items()))
    source.metadata()
    gone_through.clear()
    group = Group()
    patient = DeferredErrors(engine := Engine(group, fails, after), "7")
    stoppable(Trainer)(patient, source, group).send_weights()
    return group, engine, patient, gone_through


def test_weights_are_broadcast_to_engines_that_receive():
    group, engine, patient, gone_through = sent()
    patient.check()
    assert engine.calls == ["start", "update", "finish"]
    assert group.sent == [float(i) for i in range(len(WEIGHTS))] and not group.aborted.is_set()
    assert gone_through == list(WEIGHTS)


@pytest.mark.parametrize(("fails", "after"), [("start", 0), ("update", 0), ("update", 2)])
def test_an_engine_that_refuses_or_dies_does_not_keep_the_trainer_waiting(fails, after):
    """Every rank goes through all weights, and then the error is there."""
    group, engine, patient, gone_through = sent(fails, after)
    assert gone_through == list(WEIGHTS), "the other ranks gather with this one"
    assert len(group.sent) <= after and "finish" not in engine.calls
    with pytest.raises(WorkerError, match="the engine is gone"):
        patient.check()


def test_ranks_that_do_not_send_go_through_the_weights_alone():
    gone_through: list[str] = []
    source = WeightSource(lambda: ((n, t, gone_through.append(n))[:2] for n, t in WEIGHTS.items()))
    stoppable(Trainer)(DeferredErrors(None), source, None).send_weights()
    assert gone_through == 2 * list(WEIGHTS), "once for their sizes"
