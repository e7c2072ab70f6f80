"""The digest of a model's weights: of every bit, name, shape and place, and of nothing else."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
from torch import Tensor

from models import fingerprint
from models.fingerprint import weights_fingerprint

DTYPES = {torch.float32: np.int32, torch.bfloat16: np.int16, torch.float64: np.int64, torch.uint8: np.int8}


def mixed(bit: int, place: int) -> int:
    found = bit + place * 0x9E3779B97F4A7C15
    for factor in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB):
        found = found * factor % 2**64
        found ^= found >> 32
    return found


def by_hand(name: str, tensor: Tensor, dtype: torch.dtype) -> str:
    """The digest of one tensor, in Python's own integers."""
    bits = np.frombuffer(tensor.contiguous().view(torch.uint8).numpy().tobytes(), DTYPES[dtype]).tolist()
    total = sum(mixed(bit, place) for place, bit in enumerate(bits)) % 2**64
    line = f"{name} {tuple(tensor.shape)} {tensor.dtype} {total}\n"
    return hashlib.sha256(line.encode()).hexdigest()[:32]


def made(dtype: torch.dtype, *shape: int) -> Tensor:
    drawn = torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 50
    return drawn.to(dtype if dtype.is_floating_point else torch.int32).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("at_once", [1, 7, 64, 1 << 18])
def test_it_is_the_sum_of_the_formula(
    dtype: torch.dtype, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(fingerprint._AT_ONCE, "cpu", at_once)
    for tensor in (made(dtype, 5, 13), made(dtype, 64), made(dtype, 13, 5).T, made(dtype, 0, 4)):
        assert weights_fingerprint([("w", tensor)]) == by_hand("w", tensor, dtype)


def test_a_bit_a_place_and_a_name_change_it() -> None:
    """In a sum of bit patterns times positions, changes of three neighbours by d, -2d and d would cancel."""
    tensor = made(torch.float32, 40, 3)
    flipped, swapped, near, far = (tensor.clone() for _ in range(4))
    flipped.view(torch.int32)[39, 2] ^= 1
    swapped[[0, 39]] = swapped[[39, 0]]
    for changed, size in ((near, 1), (far, 1 << 20)):
        for place, factor in ((4, 1), (5, -2), (6, 1)):
            changed.view(torch.int32).view(-1)[place] += factor * size
    others = [[("w", other)] for other in (tensor, flipped, swapped, near, far, tensor.T)]
    others += [[("v", tensor)], [("w", tensor), ("v", tensor)], []]
    assert len({weights_fingerprint(weights) for weights in others}) == len(others)
