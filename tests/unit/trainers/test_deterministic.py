"""Operations that a step has not, found without a GPU as they are called: those that make the host wait for
the device, and with ``deterministic=true`` those of ours that torch refuses on a GPU."""

from __future__ import annotations

import os
import sys

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from common.errors import UserError
from data.batches import Segment
from jobs.diagnostics import Diagnostics
from models import distributed
from models.distributed import start, stop
from models.pretrained import load_policy
from rollouts.decoding import Decoder
from rollouts.embedded import uniforms
from tests.engine import engine_config, make_trainer
from tests.tiny import ROOT, random_groups, tiny_llama, tiny_policy
from trainers.basic import BasicTrainer
from trainers.losses.base import running_sum

aten = torch.ops.aten
FLOATS = {aten.cumsum, aten.cumsum_, aten.histc, aten.put_, aten.kthvalue, aten.bincount, aten.cumprod}
"""What ``torch.use_deterministic_algorithms`` refuses of floats on a GPU, and could come up here."""
READS = {
    *(aten._local_scalar_dense, aten.item, aten.is_nonzero, aten.equal, aten.nonzero, aten.masked_select),
    *(aten.argwhere, aten._unique2, aten.unique_dim, aten.unique_consecutive, aten.bincount),
    aten.repeat_interleave,
}
"""Operations whose result, or its shape, the host has to know."""
INDEXED = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}
READERS = {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.cpu, torch.Tensor.__array__}


class Operations(TorchDispatchMode):
    """Notes operations wherever they are called from: backward, FSDP and the optimizer too."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[str] = []
        self.vary: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        packet = func.overloadpacket
        masks = packet in INDEXED and any(
            i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1]
        )
        if packet in READS or masks:
            self.read.append(f"{func} from {ours()}")
        if packet in FLOATS and args[0].is_floating_point():
            self.vary.append(f"{func} from {ours()}")
        return func(*args, **(kwargs or {}))


class Calls(TorchFunctionMode):
    """Notes methods that read a tensor."""

    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in READERS:
            self.found.append(f"{func.__name__} from {ours()}")
        return func(*args, **(kwargs or {}))


def ours() -> str:
    """file:line of the innermost frame that is the project's own, outside this file."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(str(ROOT)) and ".venv" not in name and name != __file__:
            return f"{name.removeprefix(str(ROOT) + '/')}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """The folder of a tiny model: a step is that of the policy that a run loads."""
    folder = tmp_path_factory.mktemp("tiny")
    tiny_llama().save_pretrained(folder)
    return folder


@pytest.fixture
def on():
    start(deterministic=True)
    yield
    stop()
    assert not torch.are_deterministic_algorithms_enabled()


def prepared(weights, loss: str, *overrides: str) -> tuple[BasicTrainer, Segment]:
    """A trainer before its first step, on batches of several microbatches, the last of which is short."""
    words = ["model.batch_size=4", "model.microbatches=2", f"model.name_or_path={weights}", *overrides]
    config = engine_config(weights, loss, *words)
    trainer = make_trainer(config, load_policy(config.model, start().device))
    groups = random_groups(7, kind="pairs" if trainer.rows_per_example == 2 else "labelled")
    segment = Segment(groups, config.model.batch_size, sum(map(len, groups)), config.seed)
    trainer.reference.segment = segment
    trainer.reference.refresh(trainer.policy, 0, trainer.reference.upcoming(segment, 0, 0))
    Diagnostics(trainer, [], segment.steps)  # it follows every step
    return trainer, segment


def stepped(trainer: BasicTrainer, segment: Segment) -> tuple[Operations, float | None]:
    """What the step called, and its loss."""
    with Operations() as found, Calls(found.read):
        record = trainer.step(trainer.dealer.dealt(segment, trainer.progress.position))
    return found, record.pending.read()["loss"]


# -- waiting ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        "dpo model.packing=false",
        "kto model.packing=true humanline=true sync_freq=2",
        "grpo model.packing=true humanline=true humanline_mode=sample",
    ],
)
def test_a_step_makes_the_host_wait_for_nothing(weights, words):
    trainer, segment = prepared(weights, *words.split())
    for _ in range(segment.steps):
        found, loss = stepped(trainer, segment)
        assert found.read == [] and loss is not None
    assert trainer.progress.step == segment.steps >= 2


def test_a_sync_by_distance_waits_once_a_step(weights):
    trainer, segment = prepared(weights, "dpo", "sync_mode=kl", "sync_freq=3", "sync_kl=1e-9")
    for _ in range(segment.steps):
        found, _ = stepped(trainer, segment)
        assert len(found.read) == 1 and "trainers/meters.py" in found.read[0]
    assert trainer.reference.step > 0


# -- deterministic=true ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    ["kto", "grpo humanline=true humanline_mode=sample", "grpo loss.beta=0.1 loss.kl_in=reward"],
)
def test_a_step_uses_no_operation_that_varies(on, weights, words):
    found, _ = stepped(*prepared(weights, *words.split()))
    assert found.vary == []


def test_sampling_draws_the_same_tokens_without_such_an_operation(request):
    prompts, draws = [torch.arange(3, 7).numpy()] * 2, [uniforms(7, f"{row}", 0, 12) for row in range(2)]
    start()
    policy = tiny_policy()

    def tokens() -> tuple[list[str], list[list[int]]]:
        decoder = Decoder(policy, torch.device("cpu"), synced=False)
        with Operations() as found:
            drawn = decoder.decode(prompts, [12, 12], draws, 0.9, 0.8, (5,))[0]
        return found.vary, drawn.tolist()

    varying, wanted = tokens()
    request.getfixturevalue("on")
    assert varying != [] and tokens() == ([], wanted)


@pytest.mark.parametrize("length", [0, 1, 64])
def test_a_running_sum_is_the_sum(on, length):
    values = torch.randn(3, length, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.testing.assert_close(running_sum(values), values.cumsum(-1), atol=1e-12, rtol=0)


def test_what_would_undo_it_is_refused(monkeypatch):
    monkeypatch.setattr(os, "environ", {"NCCL_ALGO": "NVLS"})
    with pytest.raises(UserError, match="NCCL_ALGO=Ring or Tree, not NVLS: unset it"):
        distributed.compute_deterministically(gpu=True)
    assert not torch.are_deterministic_algorithms_enabled()
