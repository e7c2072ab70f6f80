"""Token log-probabilities from hidden states, without ever holding the logits of a batch.

At a vocabulary of 128k the float32 logits of 16k completion tokens take 8 GB, and their gradient as much
again. Here the vocabulary is processed in slices: the forward keeps a running maximum and sum of
exponentials, and the backward recomputes each slice. So memory does not grow with M x V. The weight's
gradient in a slice is one product, written once; only the hidden states' gradient [M, D] is accumulated, in
float32. A CPU keeps the logits of all slices for the backward where they are few (``KEPT``), which saves one
of four products; values and gradients are the same to the bit.

Logits have float32 *precision* whatever the model computes in: a bfloat16 product that is rounded to bfloat16
and then upcast is off by up to 0.05 nats at logits of 25, more than a one-step log-ratio.

Shapes: M completion tokens, D hidden width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

BUDGET = {"cpu": 1 << 23, "cuda": 1 << 26}
"""Number of logits held at once: 32 MB of float32 on a CPU, 256 MB on a GPU (a few times that while a slice
is processed)."""

KEPT = 2
"""Number of budgets of logits that a CPU keeps from the forward to the backward at most. The backward writes
the gradient over them, so they are 64 MB at the backward's peak."""
BLOCK = 1 << 18
"""Number of logits that a CPU exponentiates at a time: 1 MB of float32, which a core's cache holds."""


def budget_for(hidden: Tensor) -> int:
    """Return the number of logits to hold at once on the device of ``hidden``."""
    return BUDGET["cuda" if hidden.is_cuda else "cpu"]


def keeps_logits(tokens: int, vocabulary: int, budget: int = BUDGET["cpu"]) -> bool:
    """Return whether a CPU keeps the logits of ``tokens`` completion tokens until their backward."""
    return tokens * vocabulary <= KEPT * budget


@dataclass(frozen=True)
class Logits:
    """Transformation of the head's product into logits: ``softcap * tanh(scale * (h @ W.T + b) / softcap) /
    temperature``. ``scale`` and ``softcap`` are the model's, ``temperature`` is
    ``model.logit_temperature``."""

    scale: float = 1.0
    """Cohere multiplies by logit_scale, Granite divides by logits_scaling."""
    softcap: float | None = None
    """Gemma-2's final_logit_softcapping; None: no cap."""
    temperature: float = 1.0
    """Log-probabilities are those of softmax(logits / temperature); at 1 nothing is divided."""

    def of(self, raw: Tensor) -> Tensor:
        """Return logits from the head's product; may overwrite it."""
        if self.scale != 1.0:
            raw = raw.mul_(self.scale)
        logits = raw if self.softcap is None else raw.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits if self.temperature == 1.0 else logits.div_(self.temperature)

    def backward(self, grad: Tensor, logits: Tensor) -> Tensor:
        """Return the gradient of the head's product from that of the logits; may overwrite both. ``logits``
        is read where there is a softcap; elsewhere it may be ``grad`` itself."""
        if self.temperature != 1.0:
            grad = grad.div_(self.temperature)
        if self.softcap is not None:
            logits = logits if self.temperature == 1.0 else logits.mul_(self.temperature)
            grad = grad.mul_(logits.div_(self.softcap).square_().neg_().add_(1.0))
        return grad if self.scale == 1.0 else grad.mul_(self.scale)


def chunked_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    scale: float = 1.0,
    softcap: float | None = None,
    temperature: float = 1.0,
    budget: int | None = None,
) -> Tensor:
    """Return [M] float32, log softmax(logits)[targets] in nats, with gradients for hidden, weight and bias
    where they require them.

    hidden [M, D] and weight [V, D] share a dtype (float32 or bfloat16; float64 gives float64); bias [V] or
    None; targets [M] int64. ``scale``, ``softcap`` and ``temperature``: see Logits. ``budget``: number of
    logits held at once; None chooses by device.
    """
    budget = budget or budget_for(hidden)
    width = max(budget // max(len(hidden), 1), 64)
    trained = torch.is_grad_enabled() and any(
        x is not None and x.requires_grad for x in (hidden, weight, bias)
    )
    keeps = trained and not hidden.is_cuda and keeps_logits(len(hidden), len(weight), budget)
    form = Logits(scale, softcap, temperature)
    return _LogProbs.apply(hidden, weight, bias, targets, form, width, keeps)


def chunked_entropies(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    scale: float = 1.0,
    softcap: float | None = None,
    temperature: float = 1.0,
    budget: int | None = None,
) -> Tensor:
    """Return [M] float32, the entropy of softmax(logits) in nats, with gradients as ``chunked_logprobs``,
    whose arguments it takes."""
    return _Entropies.apply(
        hidden, weight, bias, Logits(scale, softcap, temperature), budget or budget_for(hidden)
    )


def _zeros(hidden: Tensor) -> Tensor:
    """Return [M] zeros in the dtype of the sums."""
    return torch.zeros(
        len(hidden), device=hidden.device, dtype=torch.promote_types(hidden.dtype, torch.float32)
    )


def _below_highest(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, form: Logits, budget: int | None
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield, one slice of the vocabulary at a time, ([M] the highest logit before the slice minus the highest
    so far; [M, v] the logits of the slice minus the highest so far; [M] the highest so far)."""
    budget = budget or budget_for(hidden)
    highest = _zeros(hidden)
    highest += torch.finfo(highest.dtype).min
    for part in _slices(weight, max(budget // max(len(hidden), 1), 64)):
        logits = form.of(_product(hidden, weight[part], None if bias is None else bias[part]))
        before, highest = highest, torch.maximum(highest, logits.amax(dim=1))
        yield before - highest, logits.sub_(highest[:, None]), highest


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        form: Logits,
        width: int,
        keeps: bool,
    ) -> Tensor:
        """``keeps``: whether the backward finds the logits instead of computing them again."""
        kept: list[Tensor] = []
        exact = torch.promote_types(hidden.dtype, torch.float32)
        highest = torch.full((len(hidden),), -torch.inf, device=hidden.device, dtype=exact)
        total, chosen = torch.zeros_like(highest), torch.zeros_like(highest)
        for part in _slices(weight, width):
            logits = form.of(_product(hidden, weight[part], None if bias is None else bias[part]))
            inside, index = _place(targets, part)
            chosen += logits.gather(1, index).squeeze(1).masked_fill_(~inside, 0.0)
            before, highest = highest, torch.maximum(highest, logits.amax(dim=1))
            total = total * (before - highest).exp() + _sum_of_shares(logits, highest, keeps)
            if keeps:
                kept.append(logits)
        normaliser = highest + total.log()
        ctx.save_for_backward(hidden, weight, bias, targets, normaliser)
        ctx.form, ctx.width, ctx.kept = form, width, kept
        return chosen - normaliser

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Apply d log p[target] / d logits = onehot(target) - softmax. On a GPU products take operands of the
        model's dtype (bfloat16, as the backward of any other layer does) and accumulate in float32; a CPU
        multiplies in float32."""
        hidden, weight, bias, targets, normaliser = ctx.saved_tensors
        kept, ctx.kept = ctx.kept, []  # the gradient is written over them, so a second backward finds none
        grads = _HeadGradients(hidden, weight, bias, ctx.needs_input_grad, normaliser.dtype)
        for i, part in enumerate(_slices(weight, ctx.width)):
            if kept:
                logits = kept[i]
            else:
                logits = ctx.form.of(_product(hidden, weight[part], None if bias is None else bias[part]))
            inside, index = _place(targets, part)
            below = logits - normaliser[:, None] if ctx.form.softcap else logits.sub_(normaliser[:, None])
            slope = below.exp_().mul_(-grad[:, None])
            slope.scatter_add_(1, index, (grad * inside)[:, None])
            grads.add(part, ctx.form.backward(slope, logits))
        return *grads.returned(), None, None, None, None


class _Entropies(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, form: Logits, budget: int
    ) -> Tensor:
        total = weighted = _zeros(hidden)  # sums of exp(d) and of exp(d) d, d = logit - highest logit so far
        highest = total
        for down, below, highest in _below_highest(hidden, weight, bias, form, budget):  # noqa: B007
            weighted, total = (weighted + total * down) * down.exp(), total * down.exp()
            shares = below.exp()
            weighted, total = weighted + (shares * below).sum(dim=1), total + shares.sum(dim=1)
        entropy = total.log() - weighted / total
        ctx.save_for_backward(hidden, weight, bias, highest + total.log(), entropy)
        ctx.form, ctx.budget = form, budget
        return entropy

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Apply d H / d logits = -p (log p + H), one slice of the vocabulary at a time."""
        hidden, weight, bias, normaliser, entropy = ctx.saved_tensors
        grads = _HeadGradients(hidden, weight, bias, ctx.needs_input_grad, normaliser.dtype)
        for part in _slices(weight, max(ctx.budget // max(len(hidden), 1), 64)):
            logits = ctx.form.of(_product(hidden, weight[part], None if bias is None else bias[part]))
            log_p = logits - normaliser[:, None]
            slope = (log_p + entropy[:, None]).mul_(log_p.exp_()).mul_(-grad[:, None])
            grads.add(part, ctx.form.backward(slope, logits))
        return *grads.returned(), None, None


class _HeadGradients:
    """Gradients of a head's inputs, added up over slices of the vocabulary."""

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, wanted: Any, exact: torch.dtype
    ) -> None:
        """``wanted``: whether hidden, weight and bias need one. ``exact``: the dtype of the sums."""
        self.inputs = hidden, weight
        self.hidden = torch.zeros(hidden.shape, dtype=exact, device=hidden.device) if wanted[0] else None
        self.weight = torch.empty_like(weight) if wanted[1] else None
        self.bias = torch.empty_like(bias) if wanted[2] and bias is not None else None

    def add(self, part: slice, slope: Tensor) -> None:
        """Add what ``slope``, [M, v], the gradient of the head's product in this slice, gives."""
        hidden, weight = self.inputs
        if self.bias is not None:
            self.bias[part] = slope.sum(dim=0)
        slope = slope.to(hidden.dtype if hidden.is_cuda else slope.dtype)
        if self.hidden is not None:
            self.hidden += _product(slope, weight[part].T)
        if self.weight is not None:
            _product(slope.T, hidden.T, out=self.weight[part])

    def returned(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        of_hidden = None if self.hidden is None else self.hidden.to(self.inputs[0].dtype)
        return of_hidden, self.weight, self.bias


def _sum_of_shares(logits: Tensor, highest: Tensor, keeps: bool) -> Tensor:
    """Return [M], the sums over a slice of exp(logit - highest). Unless ``keeps``, the logits are
    overwritten. A CPU that keeps them takes a few rows at a time, at least two of several: torch may add up a
    single row in another order."""
    if not keeps:
        return logits.sub_(highest[:, None]).exp_().sum(dim=1)
    blocks = max(min(logits.numel() // BLOCK, len(logits) // 2), 1)
    parts = zip(logits.tensor_split(blocks), highest.tensor_split(blocks), strict=True)
    return torch.cat([(rows - most[:, None]).exp_().sum(dim=1) for rows, most in parts])


def _slices(weight: Tensor, width: int) -> Iterator[slice]:
    """Return the vocabulary in slices of ``width``, rounded down to a multiple of 64 so that matrix units get
    whole tiles."""
    width = width // 64 * 64
    return (slice(first, min(first + width, len(weight))) for first in range(0, len(weight), width))


def _place(targets: Tensor, part: slice) -> tuple[Tensor, Tensor]:
    """Return ([M] whether the target lies in this slice, [M, 1] its place there, or any place where it does
    not)."""
    index = targets - part.start
    return (index >= 0) & (index < part.stop - part.start), index.clamp(0, part.stop - part.start - 1)[
        :, None
    ]


def _product(left: Tensor, right: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """Return left [A, K] @ right [B, K].T + bias [B] in float32 precision. On a GPU low-precision operands
    give a float32 result; on a CPU, which has no such kernel, operands are upcast. ``out``: where the result
    is put, rounded to its dtype; it replaces the bias."""
    if out is not None:
        direct = not left.is_cuda and left.dtype == right.dtype == out.dtype
        return torch.mm(left, right.T, out=out) if direct else out.copy_(_product(left, right))
    if left.dtype == right.dtype and left.is_cuda and left.dtype in (torch.bfloat16, torch.float16):
        out = torch.mm(left, right.T, out_dtype=torch.float32)
    else:
        exact = torch.promote_types(left.dtype, torch.float32)
        out = torch.mm(left.to(exact), right.T.to(exact))
    return out if bias is None else out.add_(bias)
