"""Frozen base weights in 4 bits under LoRA, as in QLoRA (Dettmers et al., arXiv 2305.14314), for
``model.quantization=nf4``.

A weight is rounded to one of 16 levels times the scale of its block, and the scales of blocks to 8 bits. All
lies in one plain tensor of bytes, with one row for each row of the weights. It is sharded, sent and counted
like any other parameter, and results do not depend on the number of ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from common.errors import require

KEY, NF4 = "model.quantization", "nf4"
BLOCK, NARROWEST = 64, 16
"""Largest number of values in a block, and smallest."""
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
        """Return the weights [out, in] in ``dtype`` from this layer's ``packed``, whole, on any device."""
        return unpack(packed, self.table.to(packed.device), self.in_features).to(self.dtype)


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


def block_length(columns: int) -> int:
    """Return how many values of a row share a scale: the largest number up to ``BLOCK`` that divides the row
    and is even (a byte holds two codes). Raises ConfigError where that would be less than ``NARROWEST``."""
    fitting = [n for n in range(NARROWEST, BLOCK + 1, 2) if columns % n == 0]
    none = f"which no even block of {NARROWEST} to {BLOCK} divides: use off"
    require(bool(fitting), KEY, NF4, f"a layer of this model has rows of {columns} weights, {none}")
    return max(fitting)


def pack(weight: Tensor) -> Tensor:
    """Return [out, in] weights as [out, ``RANGES`` + blocks of a row + in / 2] bytes. A row holds the divisor
    of its scales and the number added to them (float32), its scales (int8), and its codes, two per byte. For
    weights on the meta device only the shape is returned. Raises ConfigError for rows that no block length
    divides."""
    rows, columns = weight.shape
    block = block_length(columns)
    if weight.is_meta:
        return torch.empty(rows, RANGES + columns // block + columns // 2, dtype=torch.uint8, device="meta")
    here = torch.device("cuda") if torch.cuda.is_available() else weight.device  # a CPU takes minutes for 8B
    values, home = weight.to(here, torch.float32).reshape(rows, -1, block), weight.device
    largest = values.abs().amax(dim=-1)
    mean = largest.mean()
    factor = 256 / (2 * (largest - mean).abs().amax(dim=-1))
    scales = ((largest - mean) * factor[:, None]).round().clamp(-128, 127).nan_to_num(0).to(torch.int8)
    values = (values / largest[..., None]).nan_to_num(0)  # a block of zeros stays one
    codes, least = torch.zeros_like(values, dtype=torch.uint8), torch.full_like(values, torch.inf)
    for code, level in enumerate(LEVELS):
        distance = (values - level).abs()
        codes.masked_fill_(distance < least, code)
        least = torch.minimum(least, distance)
    ranges = torch.stack((factor, mean.expand(rows)), dim=1).view(torch.uint8)
    pairs = codes[..., ::2] << 4 | codes[..., 1::2]
    return torch.cat((ranges, scales.view(torch.uint8), pairs.flatten(1)), dim=1).to(home)


def unpack(packed: Tensor, table: Tensor, columns: int) -> Tensor:
    """Return [out, in] float32, the weights that ``pack`` turned into bytes. ``table`` [256, 2]: the two
    values of each byte."""
    block = block_length(columns)
    first, scales, codes = packed.split((RANGES, columns // block, columns // 2), dim=1)
    ranges = first.clone(memory_format=torch.contiguous_format).view(torch.float32)
    scale = scales.view(torch.int8) / ranges[:, :1] + ranges[:, 1:]
    values = table.index_select(0, codes.int().flatten())
    return values.view(-1, columns // block, block).mul_(scale[..., None]).view(-1, columns)


def quantise(blocks: list[nn.Module]) -> None:
    """Replace every frozen linear layer of these decoder blocks, that is all but LoRA's adapters, by an
    ``NF4Linear``.

    Raises ConfigError for a model most of whose blocks' weights are not in linear layers, and as ``pack``.
    """
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
    return {f"{name}.packed": one for name, one in model.named_modules() if isinstance(one, NF4Linear)}


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
