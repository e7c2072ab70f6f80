"""Muon, which makes the momentum of the layers' matrices orthogonal, with AdamW for all other weights (Jordan
et al., https://kellerjordan.github.io/posts/muon; Liu et al., arXiv 2502.16982).

The arithmetic is torch.optim.Muon's. That class would run its iteration on the shards of a sharded matrix:
each product would need an exchange between ranks, sums would come in another order, and a matrix with fewer
rows than there are ranks would fail. Here one rank gathers a matrix once and makes it orthogonal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.optim._muon import DEFAULT_A, DEFAULT_B, DEFAULT_C, DEFAULT_NS_STEPS, EPS
from torch.optim._muon import _adjust_lr as adjusted
from torch.optim._muon import _zeropower_via_newtonschulz as newton_schulz
from transformers.pytorch_utils import Conv1D

from models.distributed import by_turns
from models.shards import local_part

LINEAR = (nn.Linear, Conv1D)
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def matrices(blocks: Iterable[nn.Module]) -> list[nn.Parameter]:
    """The trained matrices of these layers: weights of linear maps, and stacks of such weights (the experts
    of a mixture). A router's weight is not among them. They are sorted by size, smallest first, so that the
    ranks work on matrices of about the same size at the same time."""
    weights = [
        p
        for block in blocks
        for module in block.modules()
        for p in module.parameters(recurse=False)
        if p.requires_grad and is_matrix(p, module)
    ]
    return sorted(weights, key=Tensor.numel)


def is_matrix(parameter: nn.Parameter, module: nn.Module) -> bool:
    """Whether a module's parameter is a linear map, or a stack of them."""
    stack = parameter.ndim == 3 and not isinstance(module, CONVOLUTIONS)
    return stack or (parameter.ndim == 2 and isinstance(module, LINEAR))


class MuonWithAdamW(torch.optim.Optimizer):
    """One optimizer for both: its first parameter group holds the matrices, its second the weights that AdamW
    trains. There is no second group without such weights.

    If the attribute ``found_inf`` ([] float32 on the device) is set and 1, a step changes neither weights nor
    state. The fused kernel of AdamW reads the same attribute.
    """

    def __init__(
        self,
        matrices: list[nn.Parameter],
        rest: torch.optim.AdamW | None,
        *,
        lr_ratio: float,
        weight_decay: float,
        momentum: float,
        adjust_lr: str,
    ) -> None:
        """``lr_ratio``: learning rate of the matrices divided by that of the rest. ``adjust_lr``: the
        argument ``adjust_lr_fn`` of torch.optim.Muon."""
        self._adamw = rest
        muon = {
            "params": matrices,
            "lr": 0.0,
            "lr_ratio": lr_ratio,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "adjust_lr": adjust_lr,
        }
        super().__init__([muon, *([] if rest is None else rest.param_groups)], {})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update at each group's "lr". ``closure`` is not called."""
        muon, *others = self.param_groups
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        if self._adamw is not None:
            self._adamw.state, self._adamw.param_groups = self.state, others  # loading replaces both
            self._adamw.found_inf = found_inf  # type: ignore[attr-defined]
            self._adamw.step()
        trained = [p for p in muon["params"] if p.grad is not None]
        skip = None if found_inf is None else found_inf > 0
        updates = (self._momentum(p, muon["momentum"], skip) for p in trained)
        for p, update in zip(trained, by_turns(updates, orthogonal), strict=True):
            lr = muon["lr"]
            weights = local_part(p)
            before = None if skip is None else weights.clone()
            weights.mul_(1 - lr * muon["weight_decay"])
            weights.add_(update, alpha=-adjusted(lr, muon["adjust_lr"], p.shape[-2:]))
            if skip is not None and before is not None:
                torch.where(skip, before, weights, out=weights)

    def _momentum(self, p: nn.Parameter, momentum: float, skip: Tensor | None) -> Tensor:
        """Return the Nesterov momentum in bfloat16, the precision of the iteration. Moves the momentum
        buffer, unless the step is skipped. Overwrites the gradient."""
        assert p.grad is not None
        if "momentum_buffer" not in self.state[p]:
            self.state[p]["momentum_buffer"] = torch.zeros_like(p.grad)
        buffer, gradient = local_part(self.state[p]["momentum_buffer"]), local_part(p.grad)
        if skip is not None:
            torch.where(skip, buffer, gradient, out=gradient)
        buffer.lerp_(gradient, 1 - momentum)
        gradient.lerp_(buffer, momentum)
        return p.grad.bfloat16()


def orthogonal(whole: Tensor) -> Tensor:
    """Return ``whole`` ([rows, columns], or a stack of such matrices) with its singular values moved near
    1."""
    if whole.ndim == 3:
        return torch.stack([orthogonal(each) for each in whole])
    return newton_schulz(whole, (DEFAULT_A, DEFAULT_B, DEFAULT_C), DEFAULT_NS_STEPS, EPS)
