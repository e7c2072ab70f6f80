"""Frozen base weights in 4 bits under LoRA, as in QLoRA (Dettmers et al., arXiv 2305.14314), for
``model.quantization=nf4``.

A weight is rounded to one of 16 levels times the scale of its block, and the scales of blocks to 8 bits. All
lies in one plain tensor of bytes, with one row for each row of the weights. It is sharded, sent and counted
like any other parameter, and results do not depend on the number of ranks.
"""

from __future__ import annotations

from math import gcd
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from common.errors import require

KEY, NF4 = "model.quantization", "nf4"
BLOCK, NARROWEST = 64, 16
"""Largest number of values in a block, and smallest. A row has blocks of the one that divides both."""
RANGES = 8
"""Number of bytes at the beginning of a row: two float32, the divisor of the row's scales and the number
added to them. They are bytes because FSDP would round parameters of a floating-point dtype."""
LEVELS = (
    *(-1.0, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0.0),
    *(0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.7230, 1.0),
)
"""Values of the 16 codes: quantiles of a normal distribution, and 0."""


class NF4Linear(nn.Module):
    """A frozen linear layer whose weights are kept in 4 bits. ``packed`` is [rows, bytes of a row] uint8. Its
    products are those of a linear layer with the weights that ``unpack`` returns, in the input's dtype."""

    table: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.dtype, self.columns = linear.weight.dtype, linear.in_features
        """Dtype that the weights had before, and in which they are exported; their number in a row."""
        self.packed = nn.Parameter(pack(linear.weight.detach()), requires_grad=False)
        self.bias = linear.bias
        levels = torch.tensor(LEVELS)
        self.register_buffer("table", torch.cartesian_prod(levels, levels), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., out] for ``x`` [..., in]."""
        return _Product.apply(x, self.packed, self.table, self.bias, self.columns)  # type: ignore[no-any-return, no-untyped-call]


class _Product(torch.autograd.Function):
    """Product of a linear layer whose backward computes the weights again instead of keeping them."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, packed: Tensor, table: Tensor, bias: Tensor | None, columns: int
    ) -> Tensor:
        ctx.save_for_backward(packed, table)
        ctx.columns = columns
        return F.linear(x, unpack(packed, table, columns).to(x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, None, None, None]:
        packed, table = ctx.saved_tensors
        (gradient,) = gradients
        return gradient @ unpack(packed, table, ctx.columns).to(gradient.dtype), None, None, None, None


def pack(weight: Tensor) -> Tensor:
    """Return [out, in] weights as [out, ``RANGES`` + blocks of a row + in / 2] bytes. A row holds the divisor
    of its scales and the number added to them (float32), its scales (int8), and its codes, two per byte."""
    on_gpu = torch.cuda.is_available() and not weight.is_meta  # a CPU takes minutes for 8B
    values = weight.to("cuda" if on_gpu else weight.device, torch.float32)
    values = values.unflatten(1, (-1, gcd(weight.shape[1], BLOCK)))
    largest = values.abs().amax(dim=-1)
    mean = largest.mean()
    factor = 256 / (2 * (largest - mean).abs().amax(dim=-1))
    scales = ((largest - mean) * factor[:, None]).round().clamp(-128, 127).nan_to_num(0).to(torch.int8)
    values = (values / largest[..., None]).nan_to_num(0)  # a block of zeros stays one
    levels = torch.tensor(LEVELS, device=values.device).double()  # in which the middle of two is exact
    codes = torch.bucketize(values.double(), (levels[1:] + levels[:-1]) / 2).to(torch.uint8)
    ranges = torch.stack((factor, mean.expand(len(weight))), dim=1).view(torch.uint8)
    pairs = codes[..., ::2] << 4 | codes[..., 1::2]
    return torch.cat((ranges, scales.view(torch.uint8), pairs.flatten(1)), dim=1).to(weight.device)


def unpack(packed: Tensor, table: Tensor, columns: int) -> Tensor:
    """Return [out, in] float32, the weights that ``pack`` turned into bytes. ``table`` [256, 2]: the two
    values of each byte."""
    blocks = columns // gcd(columns, BLOCK)
    first, scales, codes = packed.split((RANGES, blocks, columns // 2), dim=1)
    ranges = first.clone(memory_format=torch.contiguous_format).view(torch.float32)
    scale = scales.view(torch.int8) / ranges[:, :1] + ranges[:, 1:]
    values = table.index_select(0, codes.int().flatten())
    return values.view(-1, blocks, columns // blocks).mul_(scale[..., None]).flatten(1)


def quantise(blocks: list[nn.Module]) -> None:
    """Replace every frozen linear layer of these decoder blocks, that is all but LoRA's adapters, by an
    ``NF4Linear``. Raises ConfigError for rows that no number of blocks fills, and for a model most of whose
    weights are not in linear layers."""
    whole = nn.ModuleList(blocks)
    frozen = sum(p.numel() for p in whole.parameters() if not p.requires_grad)
    linear = {name: one for name, one in whole.named_modules() if type(one) is nn.Linear}
    layers = {name: one for name, one in linear.items() if not one.weight.requires_grad}
    share = sum(one.weight.numel() for one in layers.values()) / max(frozen, 1)
    problem = f"only {share:.0%} of this model's weights are in linear layers (no experts' are): use off"
    require(share >= 0.5, KEY, NF4, problem)
    for name, one in layers.items():
        problem = f"{name} has rows of {one.in_features} weights, no multiple of {NARROWEST}: use off"
        require(one.in_features % NARROWEST == 0, KEY, NF4, problem)
        whole.set_submodule(name, NF4Linear(one))


def quantised(model: nn.Module) -> dict[str, NF4Linear]:
    """Return name of ``packed`` in a state dict -> its layer, for every quantised layer."""
    return {f"{name}.packed": one for name, one in model.named_modules() if isinstance(one, NF4Linear)}
