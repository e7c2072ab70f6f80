"""Frozen base weights in 4 bits under LoRA, as in QLoRA (Dettmers et al., arXiv 2305.14314), for
``model.quantization=nf4``.

torchao computes the numbers: its ``NF4Tensor`` rounds a weight to one of 16 levels times the scale of its
block, and the scales of blocks to 8 bits. Its class can be sharded only where every rank gets whole blocks of
blocks, and a state dict that one rank sends to the others does not carry it. Here the same numbers lie in one
plain tensor of bytes, with one row for each row of the weights. It is sharded, sent and counted like any
other parameter, and results do not depend on the number of ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from common.errors import ConfigError, require
from common.small_gpus import import_with_torchao

KEY, NF4 = "model.quantization", "nf4"
BLOCK, NARROWEST = 64, 16
"""Largest number of values in a block, as in torchao, and smallest."""
RANGES = 8
"""Number of bytes at the beginning of a row: two float32, the divisor of the row's scales and the number
added to them. They are kept as bytes because FSDP would round floating-point parameters to the dtype of the
computation."""
LEVELS = (
    *(-1.0, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0.0),
    *(0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.7230, 1.0),
)
"""Values of the 16 codes, as in torchao: quantiles of a normal distribution, and 0."""
ZEROS = 0x77
"""A byte with two codes for 0."""


class NF4Linear(nn.Module):
    """A frozen linear layer whose weights are kept in 4 bits. ``packed`` is [rows, bytes of a row] uint8. Its
    products are those of a linear layer with the weights ``weight``, in the input's dtype."""

    packed: nn.Parameter
    table: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        """Keep the bias of ``linear`` as it is. Raises ConfigError for rows that no block length divides."""
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.dtype = linear.weight.dtype
        """Dtype that the weights had before, and in which they are exported."""
        self.packed = nn.Parameter(pack(linear.weight.detach()), requires_grad=False)
        self.bias = linear.bias
        codes = torch.arange(256)
        pairs = torch.tensor(LEVELS)[torch.stack((codes >> 4, codes & 15), dim=1)]
        self.register_buffer("table", pairs, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., out] for ``x`` [..., in]."""
        product: Tensor = _Product.apply(x, self.packed, self.table, self.bias, self.in_features)  # type: ignore[no-untyped-call]
        return product

    @property
    def weight(self) -> Tensor:
        """[out, in] weights as the products use them, for models that read them directly; this rank must have
        the whole layer."""
        return self.dequantised(self.packed)

    @torch.no_grad()
    def dequantised(self, packed: Tensor) -> Tensor:
        """Return the weights [out, in] in ``dtype`` from this layer's ``packed``, a whole and plain tensor on
        any device."""
        return unpack(packed, self.table.to(packed.device), self.in_features).to(self.dtype)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, {NF4}"


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


def block_length(columns: int) -> int | None:
    """Return how many values of a row share a scale: the largest number up to ``BLOCK`` that divides the row
    and is even (a byte holds two codes). None where that would be less than ``NARROWEST``."""
    fitting = [n for n in range(NARROWEST, BLOCK + 1, 2) if columns % n == 0]
    return max(fitting, default=None)


def pack(weight: Tensor) -> Tensor:
    """Return [out, in] weights as [out, ``RANGES`` + blocks of a row + in / 2] bytes. A row holds the divisor
    of its scales and the number added to them (float32), its scales (int8), and its codes, two per byte. For
    weights on the meta device only the shape is returned.

    Where torchao divides by 0, a block of zeros is 0 here, and scales that are all alike are their mean.
    Raises ConfigError for rows that no block length divides, and where torchao is missing.
    """
    rows, columns = weight.shape
    block = block_length(columns)
    if block is None:
        raise ConfigError(
            KEY,
            NF4,
            f"a layer of this model has rows of {columns} weights, which no even block of {NARROWEST} to "
            f"{BLOCK} divides: use off",
        )
    blocks = columns // block
    if weight.is_meta:
        return torch.empty(rows, RANGES + blocks + columns // 2, dtype=torch.uint8, device="meta")
    here = torch.device("cuda") if torch.cuda.is_available() else weight.device  # a CPU takes minutes for 8B
    weight, home = weight.to(here, torch.float32).contiguous(), weight.device
    made = torchao_nf4().from_tensor(weight, block, blocks)
    assert made.nf4.tolist() == torch.tensor(LEVELS).tolist(), "this torchao has other levels"
    factor = made.quantization_factor
    scales = made.quantized_scalers.view(rows, blocks)
    scales = torch.where(factor[:, None].isinf(), torch.zeros_like(scales), scales)
    codes = made.quantized_data.view(rows, blocks, block // 2)
    nothing = (weight.view(rows, blocks, block) == 0).all(dim=-1, keepdim=True)
    codes = torch.where(nothing, ZEROS, codes).to(torch.uint8)
    ranges = torch.stack((factor, made.scaler_mean.expand(rows)), dim=1)
    return torch.cat((ranges.view(torch.uint8), scales.view(torch.uint8), codes.flatten(1)), dim=1).to(home)


def unpack(packed: Tensor, table: Tensor, columns: int) -> Tensor:
    """Return [out, in] float32, the weights that ``pack`` turned into bytes. ``table`` [256, 2]: the two
    values of each byte."""
    block = block_length(columns)
    assert block is not None
    blocks = columns // block
    first, scales, codes = packed.split((RANGES, blocks, columns // 2), dim=1)
    ranges = first.clone(memory_format=torch.contiguous_format).view(torch.float32)
    scale = scales.view(torch.int8) / ranges[:, :1] + ranges[:, 1:]
    values = table.index_select(0, codes.int().flatten())
    return values.view(-1, blocks, block).mul_(scale[..., None]).view(-1, columns)


def torchao_nf4() -> Any:
    """Return torchao's NF4Tensor. Raises ConfigError where torchao is not installed."""
    return import_with_torchao("torchao.quantization", KEY, NF4, f"use {KEY}=off").NF4Tensor


def quantise(blocks: list[nn.Module]) -> None:
    """Replace every frozen linear layer of these decoder blocks, that is all but LoRA's adapters, by an
    ``NF4Linear``.

    Raises ConfigError for a model most of whose blocks' weights are not in linear layers, and as ``pack``.
    """
    torchao_nf4()
    frozen = sum(p.numel() for block in blocks for p in block.parameters() if not p.requires_grad)
    linear_layers = [
        (parent, name, module)
        for block in blocks
        for parent in block.modules()
        for name, module in parent.named_children()
        if type(module) is nn.Linear and not module.weight.requires_grad
    ]
    share = sum(module.weight.numel() for _, _, module in linear_layers) / max(frozen, 1)
    require(
        share >= 0.5,
        KEY,
        NF4,
        f"{share:.0%} of the weights of this model's layers are in linear layers, which alone are quantised "
        "(a mixture's experts and transposed weights are none): use off",
    )
    for parent, name, module in linear_layers:
        setattr(parent, name, NF4Linear(module))


def quantised(model: nn.Module) -> dict[str, NF4Linear]:
    """Return name of ``packed`` in a state dict -> its layer, for every quantised layer."""
    return {
        f"{name}.packed": module for name, module in model.named_modules() if isinstance(module, NF4Linear)
    }


def weight_name(packed: str) -> str:
    """Return the name that the weights of ``packed`` have in a model that is not quantised."""
    return f"{packed.removesuffix('packed')}weight"


def count_weights(model: nn.Module) -> int:
    """Return how many numbers the parameters stand for, each counted once."""
    layers = quantised(model)
    return sum(
        layer.in_features * layer.out_features if (layer := layers.get(name)) is not None else p.numel()
        for name, p in model.named_parameters()
    )
