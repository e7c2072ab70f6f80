"""``deterministic=true``: nothing of ours is computed by an operation that torch refuses on a GPU."""

from __future__ import annotations

import os

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from common.errors import UserError
from models import distributed
from models.distributed import start, stop
from rollouts.decoding import Decoder
from rollouts.embedded import uniforms
from tests.tiny import tiny_policy
from tests.unit.trainers.test_host_waits import prepared, weights  # noqa: F401 (a fixture)
from trainers.losses.base import running_sum

aten = torch.ops.aten
FLOATS = {aten.cumsum, aten.cumsum_, aten.histc, aten.put_, aten.kthvalue, aten.bincount, aten.cumprod}
"""What ``torch.use_deterministic_algorithms`` refuses of floats on a GPU, and could come up here."""


class Refused(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func.overloadpacket not in FLOATS or not args[0].is_floating_point(), func
        return func(*args, **(kwargs or {}))


@pytest.fixture
def on():
    start(deterministic=True)
    yield
    stop()
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize(
    "words",
    ["kto", "grpo humanline=true humanline_mode=sample", "grpo loss.beta=0.1 loss.kl_in=reward"],
)
def test_a_step_uses_no_operation_that_varies(on, weights, words):  # noqa: F811
    trainer, segment = prepared(weights, *words.split())
    with Refused():
        trainer.step(trainer.dealer.dealt(segment, trainer.progress.position))
    assert trainer.progress.step == 1


def test_sampling_draws_the_same_tokens_without_such_an_operation(request):
    prompts, draws = [torch.arange(3, 7).numpy()] * 2, [uniforms(7, f"{row}", 0, 12) for row in range(2)]
    start()
    policy = tiny_policy()

    def tokens() -> list[list[int]]:
        decoder = Decoder(policy, torch.device("cpu"), synced=False)
        return decoder.decode(prompts, [12, 12], draws, 0.9, 0.8, (5,))[0].tolist()

    wanted = tokens()
    request.getfixturevalue("on")
    with Refused():
        assert tokens() == wanted


@pytest.mark.parametrize("length", [0, 1, 64])
def test_a_running_sum_is_the_sum(on, length):
    values = torch.randn(3, length, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.testing.assert_close(running_sum(values), values.cumsum(-1), atol=1e-12, rtol=0)


def test_what_would_undo_it_is_refused(monkeypatch):
    monkeypatch.setattr(os, "environ", {"NCCL_ALGO": "NVLS"})
    with pytest.raises(UserError, match="NCCL_ALGO=Ring or Tree, not NVLS: unset it"):
        distributed.compute_deterministically(gpu=True)
    assert not torch.are_deterministic_algorithms_enabled()
