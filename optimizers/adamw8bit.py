"""AdamW with its moments in 8 bits (Dettmers et al., arXiv 2110.02861).

The arithmetic is torchao's: the step of its ``AdamW8bit``, which is compiled on a GPU here too, and its 8-bit
tensors. torchao's class cuts a rank's shard into blocks that run across rows, and it cannot skip a step. Here
a block lies within one row of the whole weight. So the moments do not depend on the number of ranks, and a
checkpoint can be read by any number of them. The moments are plain tensors in the state, and a step can be
skipped on the device.

Only ``optimizers.build.eight_bits`` imports this module: it says what to install where torchao is missing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torchao.optim.adam import single_param_adam
from torchao.optim.subclass_8bit import OptimState8bit, get_qmap_signed, get_qmap_unsigned

from models.shards import local_part, sharded_like

BLOCK = 256
"""The most values that share a scale, as in torchao."""
NARROWEST = 8
"""The fewest values that share a scale. A row that no block length from here to ``BLOCK`` divides keeps its
moments in float32."""
FEWEST = 4096
"""Tensors with fewer values keep their moments in float32, as in torchao."""
PIECE = 2**22
"""The number of values of a tensor that are updated at once. It bounds the temporary memory of a step."""
MOMENTS = {"exp_avg": True, "exp_avg_sq": False}
"""AdamW's names of its moments -> whether their values have a sign."""
VALUES = {True: get_qmap_signed(), False: get_qmap_unsigned()}
"""Whether values have a sign -> the 256 numbers in [-1, 1] that the codes stand for. They are made when the
module is imported, because tensors that the memory simulation makes have no values."""


class AdamW8bit(torch.optim.Optimizer):
    """AdamW. If the attribute ``found_inf`` ([] float32 on the device) is set and 1, a step changes neither
    weights nor state. The fused kernel of AdamW reads the same attribute.

    The state of a parameter is ``step`` ([] float32) and its two moments. A moment is either ``exp_avg``
    (float32, shaped like the parameter), or ``exp_avg_codes`` (uint8, shaped like the parameter) together
    with ``exp_avg_scale`` (float32 [..., blocks of a row]). All of them are sharded like the parameter.
    """

    def __init__(
        self,
        params: list[nn.Parameter],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        compiled: bool | None = None,
    ) -> None:
        """``compiled``: whether the step is compiled; None compiles it on a GPU alone."""
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        device = params[0].device
        self._maps = {signed: torch.tensor(values, device=device) for signed, values in VALUES.items()}
        compiled = device.type == "cuda" if compiled is None else compiled
        self._move = compiled_step() if compiled else single_param_adam

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update at each group's "lr". ``closure`` is not called."""
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                if not self.state[p]:
                    self.state[p] = beginning(p)
                lr = torch.full((), group["lr"], device=p.device)
                skip = torch.zeros_like(lr, dtype=torch.bool) if found_inf is None else found_inf > 0
                self._update(p, group, lr, skip)

    def _update(self, p: nn.Parameter, group: dict[str, Any], lr: Tensor, skip: Tensor) -> None:
        """Update a parameter and its state; leave both as they are where ``skip`` ([] bool) is true."""
        state = self.state[p]
        step = state["step"] + 1
        for gradient, *before in pieces(p, state):
            after = [tensor.clone() for tensor in before]
            self._move(
                after[0],
                gradient,
                step,
                *self._moments(after[1:]),
                None,
                lr,
                *group["betas"],
                group["weight_decay"],
                group["eps"],
                True,
                False,
            )
            for old, new in zip(before, after, strict=True):
                torch.where(skip, old, new, out=old)
        torch.where(skip, state["step"], step, out=state["step"])

    def _moments(self, tensors: list[Tensor]) -> Iterator[Tensor]:
        """The two moments as torchao's step takes them. ``tensors``: the two moments in float32, or codes and
        scales of the first, then of the second."""
        if len(tensors) == len(MOMENTS):
            yield from tensors
            return
        for codes, scale, signed in zip(tensors[::2], tensors[1::2], MOMENTS.values(), strict=True):
            yield OptimState8bit(codes, scale, self._maps[signed], signed, dtype=torch.float32)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state as any optimizer does, but keep codes as bytes: torch would convert them to
        float32."""
        super().load_state_dict({**state_dict, "state": {}})
        theirs, mine = (
            itertools.chain.from_iterable(group["params"] for group in groups)
            for groups in (state_dict["param_groups"], self.param_groups)
        )
        for key, p in zip(theirs, mine, strict=True):
            if key in state_dict["state"]:
                self.state[p] = dict(state_dict["state"][key])


def compiled_step() -> Callable[..., None]:
    """Return torchao's step, compiled once for each shape of its arguments, without a limit on their
    number."""
    made = torch.compile(single_param_adam, fullgraph=True, dynamic=False)

    def move(*arguments: Any) -> None:
        with torch._dynamo.utils.disable_cache_limit():
            made(*arguments)

    return move


def block_length(p: Tensor) -> int | None:
    """The number of values of a row that share a scale: the largest divisor of the row's length up to
    ``BLOCK``. None: the moments of ``p`` are float32."""
    if p.ndim < 2 or p.numel() < FEWEST:
        return None
    most = max(n for n in range(1, BLOCK + 1) if p.shape[-1] % n == 0)
    return most if most >= NARROWEST else None


def kept(block: int | None) -> list[str]:
    """The names of the state's tensors beside "step", in order."""
    return [f"{name}{kind}" for name in MOMENTS for kind in ([""] if block is None else ["_codes", "_scale"])]


def beginning(p: Tensor) -> dict[str, Tensor]:
    """The state of a parameter before its first step."""
    state, block = {"step": torch.zeros((), device=p.device)}, block_length(p)
    for name in kept(block):
        if block is not None and name.endswith("_scale"):
            state[name] = zero_scales(p, block)
        else:
            state[name] = torch.zeros_like(p, dtype=torch.uint8 if name.endswith("_codes") else None)
    return state


def zero_scales(p: Tensor, block: int) -> Tensor:
    """[..., blocks of a row] float32, sharded like ``p``."""
    local = local_part(p)
    made = torch.zeros((*local.shape[:-1], local.shape[-1] // block), device=local.device)
    return sharded_like(p, made)


def pieces(p: nn.Parameter, state: dict[str, Tensor]) -> Iterator[tuple[Tensor, ...]]:
    """Yield this rank's gradient, its weights and the tensors that ``kept`` names, as views of at most
    ``PIECE`` values each. Their shape is [values] for float32 moments; for 8-bit moments it is [n, block],
    and [n] for scales."""
    assert p.grad is not None
    block = block_length(p)
    shape = (-1,) if block is None else (-1, block)
    if local_part(p).numel() == 0:
        return
    flat = [
        local_part(p.grad).reshape(shape),
        local_part(p.detach()).view(shape),
        *(local_part(state[name]).view(-1 if name.endswith("_scale") else shape) for name in kept(block)),
    ]
    yield from zip(*(tensor.split(PIECE // (block or 1)) for tensor in flat), strict=True)
