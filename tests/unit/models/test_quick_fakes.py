"""Tensors without values are the same whether an operation is worked out or looked up: size, layout, and
which of them share memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from models.quick_fakes import QuickFakes
from tests.memory_questions import SHAPES


class Recorder(TorchDispatchMode):
    """Writes down every operation with what its tensors look like; storages by the order of their coming."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []
        self._kept: list[Any] = []
        self._storages: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.namespace == "aten":
            leaves = [*tree_leaves(args), *tree_leaves(out)]
            looks = [self.look(leaf) for leaf in leaves if isinstance(leaf, FakeTensor)]
            same = [any(leaf is one for one in tree_leaves(args)) for leaf in tree_leaves(out)]
            self.seen.append((str(func), looks, same, type(out)))
        return out

    def look(self, tensor: FakeTensor) -> tuple[Any, ...]:
        storage = tensor.untyped_storage()
        self._kept.append(storage)  # or another would get its number
        number = self._storages.setdefault(storage._cdata, len(self._storages))
        keys = torch._C._dispatch_keys(tensor).raw_repr()
        shape = tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.device
        return (*shape, keys, tensor.requires_grad, storage.nbytes(), number)


def recorded(mode: FakeTensorMode, work: Callable[[], Any]) -> list[Any]:
    with mode, Recorder() as recorder:
        work()
    return recorder.seen


def train() -> None:
    """Two steps of a small model, and of the operations that sharding adds."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(SHAPES["deep"])
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    for _ in range(2):
        tokens = torch.ones(2, 9, dtype=torch.int64)
        loss = model(input_ids=tokens).logits.float().logsumexp(-1).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def views() -> None:
    x = torch.zeros(6, 4)
    a, b = torch.split(x, [2, 4])
    torch.cat([a.t(), b.t()], 1).view(2, 12)[:, 1:3].add_(1)
    x.add_(x).mul_(a.sum())
    x[1:].copy_(x[:5])
    y = x.expand(2, 6, 4).reshape(12, 4).unbind(0)
    torch._foreach_add_(list(y[:3]), 2.0)
    x.t_().unsqueeze_(0)
    torch.zeros(4, 6).t_() @ x[0]
    (x + 1, x + 1.0, x + True, x.to(torch.bfloat16) + 1.5, x.to(torch.int32) + 1, x.to(torch.int32) + 1.0)
    nn.functional.scaled_dot_product_attention(*(torch.zeros(1, 2, 5, 8),) * 3, is_causal=True)
    (y[0].view(2, 2), y[1].view(2, 2))
    for out in (torch.empty(0), torch.empty(0)):  # which is made larger
        torch.ops.aten.add.out(torch.zeros(3), 1, out=out)
        out * 2
    y = torch.zeros_like(x)
    for one, out in ((x, x), (x, y), (y, x)):
        torch.ops.aten.add.out(one, 1, out=out)
    x.untyped_storage().resize_(0)
    (x * 2, x.detach())
    x.data = torch.ones(3)
    x * 2


@pytest.mark.parametrize("work", [train, views])
def test_what_is_looked_up_is_what_is_worked_out(work: Callable[[], None]) -> None:
    expected = recorded(FakeTensorMode(), work)
    assert len(expected) > 20 and recorded(QuickFakes(), work) == expected
    known = len(QuickFakes.known)
    assert recorded(QuickFakes(), work) == expected
    assert len(QuickFakes.known) == known


def test_what_was_seen_is_not_worked_out_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def product() -> Tensor:
        return torch.zeros(3, 5) @ torch.zeros(5, 7)

    with QuickFakes():
        product()
    monkeypatch.setattr(FakeTensorMode, "dispatch", lambda *_: pytest.fail("asked again"))
    with QuickFakes():
        assert product().shape == (3, 7)


@pytest.mark.parametrize(
    ("asks", "error"),
    [
        (lambda x: x.item(), DataDependentOutputException),
        (lambda x: x.expand(3).nonzero(), DynamicOutputShapeException),
    ],
)
def test_what_needs_values_is_refused_every_time(asks: Callable[[Tensor], Any], error: type) -> None:
    with QuickFakes():
        for _ in range(3):
            with pytest.raises(error):
                asks(torch.zeros(1).sum())


def test_constants_keep_their_values() -> None:
    with QuickFakes():
        assert [torch.tensor(float(i)).item() for i in range(3)] == [0.0, 1.0, 2.0]
        assert [(torch.tensor(i) + 1).item() for i in range(3)] == [1, 2, 3]
