"""A frozen base in 4 bits under LoRA: QLoRA (Dettmers et al., arXiv 2305.14314), ``model.quantization=nf4``.

torchao gives the numbers: its ``NF4Tensor`` rounds a weight to one of 16 levels times the scale of its block,
and the scales of blocks to 8 bits. Its class can be sharded only where whole blocks of blocks fall to every
rank, and a state dict that one rank hands to the others does not carry it. Here the same numbers lie in one
plain tensor of bytes, a row of it for a row of the weights: it is sharded, handed over and counted as any
other parameter, and what is computed does not depend on the number of ranks.
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
"""A block has at most so many values, as in torchao, and no fewer than so many."""
RANGES = 8
"""Bytes at the beginning of a row: two float32, what its scales are divided by and what is added to them.
They are kept as bytes, since FSDP would round floating-point parameters to the dtype that is computed in."""
LEVELS = (
    *(-1.0, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0.0),
    *(0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.7230, 1.0),
)
"""What the 16 codes stand for, as torchao has them: quantiles of a normal distribution, and 0."""
ZEROS = 0x77
"""A byte of two codes for 0."""


class NF4Linear(nn.Module):
    """A frozen linear layer whose weights are kept in 4 bits. ``packed`` is [rows, bytes of a row] uint8; the
    products are those of a linear layer with the weights ``weight``, in the input's dtype."""

    packed: nn.Parameter
    table: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        """Keeps the bias of ``linear`` as it is. Raises ConfigError for rows that no block divides."""
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.dtype = linear.weight.dtype
        """What the weights were before, and what they are exported in."""
        self.packed = nn.Parameter(pack(linear.weight.detach()), requires_grad=False)
        self.bias = linear.bias
        codes = torch.arange(256)
        pairs = torch.tensor(LEVELS)[torch.stack((codes >> 4, codes & 15), dim=1)]
        self.register_buffer("table", pairs, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        product: Tensor = _Product.apply(x, self.packed, self.table, self.bias, self.in_features)  # type: ignore[no-untyped-call]
        return product

    @property
    def weight(self) -> Tensor:
        """[out, in] the weights as products have them. For models that look at them by themselves; this rank
        must have the layer whole."""
        return self.dequantised(self.packed)

    @torch.no_grad()
    def dequantised(self, packed: Tensor) -> Tensor:
        """[out, in] in ``dtype`` of this layer's ``packed``, whole and a plain tensor, wherever it lies."""
        return unpack(packed, self.table.to(packed.device), self.in_features).to(self.dtype)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, {NF4}"


class _Product(torch.autograd.Function):
    """A linear layer's product whose backward makes the weights again instead of keeping them."""

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
    """How many values of a row share a scale: the most up to ``BLOCK`` that divide it and are even (two codes
    a byte). None where that would be fewer than ``NARROWEST``."""
    fitting = [n for n in range(NARROWEST, BLOCK + 1, 2) if columns % n == 0]
    return max(fitting, default=None)


def pack(weight: Tensor) -> Tensor:
    """[out, in] weights as [out, ``RANGES`` + blocks of a row + in / 2] bytes: of each row what its scales
    are divided by and what is added to them (float32), its scales (int8), its codes, two a byte. Of weights
    on the meta device the shape alone.

    Where torchao divides by 0, a block of zeros is 0 here, and scales that are all alike are their mean.
    Raises ConfigError for rows that no block divides, and where torchao is missing.
    """
    rows, columns = weight.shape
    block = block_length(columns)
    if block is None:
        raise ConfigError(
            KEY,
            NF4,
            f"a layer of this model has rows of {columns} weights, which no even block of {NARROWEST} to "
            f"{BLOCK} divides: use null",
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
    """[out, in] float32: the weights that ``pack`` made bytes of. ``table`` [256, 2]: what a byte of two
    codes stands for."""
    block = block_length(columns)
    assert block is not None
    blocks = columns // block
    first, scales, codes = packed.split((RANGES, blocks, columns // 2), dim=1)
    ranges = first.clone(memory_format=torch.contiguous_format).view(torch.float32)
    scale = scales.view(torch.int8) / ranges[:, :1] + ranges[:, 1:]
    values = table.index_select(0, codes.int().flatten())
    return values.view(-1, blocks, block).mul_(scale[..., None]).view(-1, columns)


def torchao_nf4() -> Any:
    """torchao's NF4Tensor. Raises ConfigError where it is not installed."""
    return import_with_torchao("torchao.quantization", KEY, NF4, f"use {KEY}=null").NF4Tensor


def quantise(blocks: list[nn.Module]) -> None:
    """Make every frozen linear layer of these decoder blocks an ``NF4Linear``: all but LoRA's adapters.

    Raises ConfigError for a model most of whose blocks' weights are in no linear layers, and as ``pack``.
    """
    torchao_nf4()
    frozen = sum(p.numel() for block in blocks for p in block.parameters() if not p.requires_grad)
    found = [
        (parent, name, module)
        for block in blocks
        for parent in block.modules()
        for name, module in parent.named_children()
        if type(module) is nn.Linear and not module.weight.requires_grad
    ]
    share = sum(module.weight.numel() for _, _, module in found) / max(frozen, 1)
    require(
        share >= 0.5,
        KEY,
        NF4,
        f"{share:.0%} of the weights of this model's layers are in linear layers, which alone are quantised "
        "(a mixture's experts and transposed weights are none): use null",
    )
    for parent, name, module in found:
        setattr(parent, name, NF4Linear(module))


def quantised(model: nn.Module) -> dict[str, NF4Linear]:
    """Name of its ``packed`` in a state dict -> layer."""
    return {
        f"{name}.packed": module for name, module in model.named_modules() if isinstance(module, NF4Linear)
    }


def weight_name(packed: str) -> str:
    """The name that the weights have where they are not quantised."""
    return f"{packed.removesuffix('packed')}weight"


def count_weights(model: nn.Module) -> int:
    """Numbers that the parameters stand for, each counted once."""
    layers = quantised(model)
    return sum(
        layer.in_features * layer.out_features if (layer := layers.get(name)) is not None else p.numel()
        for name, p in model.named_parameters()
    )
