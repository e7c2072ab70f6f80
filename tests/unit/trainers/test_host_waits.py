"""A step never makes the host wait for the device. Found without a device: what would make it wait is caught
as it is called."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from data.batches import Segment, to_device
from jobs.diagnostics import Diagnostics
from models.distributed import start
from models.policy import decoder_blocks
from models.pretrained import load_policy
from tests.engine import engine_config, make_trainer
from tests.tiny import ROOT, random_groups, tiny_llama
from trainers.basic import BasicTrainer

aten = torch.ops.aten
READS = {
    *(aten._local_scalar_dense, aten.item, aten.is_nonzero, aten.equal, aten.nonzero, aten.masked_select),
    *(aten.argwhere, aten._unique2, aten.unique_dim, aten.unique_consecutive, aten.bincount),
    aten.repeat_interleave,
}
"""Operations whose result, or its shape, the host has to know."""
INDEXED = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}
READERS = {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.cpu, torch.Tensor.__array__}
COPIES = {torch.Tensor.to, torch.Tensor.cuda, torch.Tensor.copy_, torch.tensor, torch.as_tensor}


class Operations(TorchDispatchMode):
    """Notes operations that read a value, wherever they were called from: backward, FSDP and the optimizer
    too."""

    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        packet = func.overloadpacket
        masks = packet in INDEXED and any(
            i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1]
        )
        if packet in READS or masks:
            self.found.append(f"{func} from {ours()}")
        return func(*args, **(kwargs or {}))


class Calls(TorchFunctionMode):
    """Notes methods that read a tensor, and copies between host and device, of our own code, that wait for
    their end."""

    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in READERS or (func in COPIES and waits(func, args, kwargs) and ours(direct=True)):
            self.found.append(f"{getattr(func, '__name__', func)} from {ours()}")
        return func(*args, **kwargs)


def waits(func: Callable[..., object], args: tuple, kwargs: dict) -> bool:
    """Whether this call copies to a named device (copy_: from wherever its source lies), and not in the
    background. In the background copies to the host ("cpu"), and to the device data.batches.to_device: from
    memory that is not pinned, a GPU's driver may make the host wait."""
    if kwargs.get("non_blocking"):
        return func is torch.Tensor.to and "cpu" not in [a for a in args if isinstance(a, str)]
    devices = [*args[1:], kwargs.get("device")]
    return func in (torch.Tensor.copy_, torch.Tensor.cuda) or any(
        isinstance(a, torch.device | str) for a in devices
    )


def ours(direct: bool = False) -> str:
    """file:line of the innermost frame that is the project's own, outside this file; "" if there is none, or
    (``direct``) if a library's lies within it."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(str(ROOT)) and ".venv" not in name and name != __file__:
            if direct and frame.f_code is to_device.__code__:  # pinned, in the background
                return ""
            return f"{name.removeprefix(str(ROOT) + '/')}:{frame.f_lineno}"
        if direct and name != __file__:
            return ""
        frame = frame.f_back
    return ""


@contextmanager
def watched() -> Iterator[list[str]]:
    found: list[str] = []
    with Calls(found), Operations(found):
        yield found


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """The folder of a tiny model: a step must wait for nothing with the policy that a run loads."""
    folder = tmp_path_factory.mktemp("tiny")
    tiny_llama().save_pretrained(folder)
    return folder


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


def stepped(trainer: BasicTrainer, segment: Segment) -> tuple[list[str], float | None]:
    """What would have made the host wait, and the step's loss."""
    with watched() as found:
        record = trainer.step(trainer.dealer.dealt(segment, trainer.progress.position))
    return found, record.pending.read()["loss"]


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
        assert found == [] and loss is not None
    assert trainer.progress.step == segment.steps >= 2


def test_a_sync_by_distance_waits_once_a_step(weights):
    trainer, segment = prepared(weights, "dpo", "sync_mode=kl", "sync_freq=3", "sync_kl=1e-9")
    for _ in range(segment.steps):
        found, _ = stepped(trainer, segment)
        assert len(found) == 1 and "trainers/meters.py" in found[0]
    assert trainer.reference.step > 0


def test_the_watch_sees_into_a_step(weights):
    """Into its backward, too."""
    trainer, segment = prepared(weights, "dpo")
    assert stepped(trainer, segment)[0] == []

    def reads_its_gradient(module, inputs, output):
        output.register_hook(lambda grad: grad * float(grad.abs().max() < 1e9))

    decoder_blocks(trainer.policy)[0].mlp.register_forward_hook(reads_its_gradient)
    reads = [one for one in stepped(trainer, segment)[0] if "_local_scalar_dense" in one]
    assert len(reads) == 2, "one a microbatch"
