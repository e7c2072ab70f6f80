"""The flash kernel of a GPU: FlashAttention-3 where it is installed and computes what attention row by row
gives, else torch's own. torch's registry of kernels is the real one; the package and the GPU are
stand-ins."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from torch.nn.attention import current_flash_attention_impl, restore_flash_attention_impl

from models import attention, flash_kernel
from models.attention import Heads, all_pack_rows
from models.flash_kernel import choose
from tests.unit.models.test_families import FAMILIES
from tests.unit.models.test_packing import OPEN, no_gpu

WORKING = """
import torch
lib = torch.library.Library("flash_attn_3", "FRAGMENT")
lib.define("fwd(Tensor q) -> Tensor")
lib.define("bwd(Tensor q) -> Tensor")
"""
BROKEN = "raise ImportError('flash_attn_3.so: undefined symbol: _ZN3c10')"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file of a stand-in for flash-attn-3, on a Hopper GPU."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.Tensor, "cuda", lambda tensor: tensor)
    sys.modules.pop(flash_kernel.PACKAGE, None)
    cached = attention.why_not_faster, attention._flash_differs
    for one in cached:
        one.cache_clear()
    yield tmp_path / f"{flash_kernel.PACKAGE}.py"
    restore_flash_attention_impl(_raise_warn=False)
    if hasattr(made := sys.modules.pop(flash_kernel.PACKAGE, None), "lib"):
        made.lib._destroy()
    for name in ("fwd", "bwd"):  # torch remembers operators that it has looked up
        vars(torch.ops.flash_attn_3).pop(name, None)
    for one in cached:
        one.cache_clear()


def works() -> None:
    return None


@cache
def works_in_every_way(in_use: str | None, heads: Heads, shared: bool, compiled: bool) -> None:
    return None


def test_it_is_used_where_it_works_and_torchs_own_elsewhere(package: Path, monkeypatch) -> None:
    assert choose(works) is None and current_flash_attention_impl() is None
    package.write_text(WORKING)
    seen: list[str | None] = []
    assert choose(lambda: seen.append(current_flash_attention_impl())) is None and seen == ["FA3"]
    assert flash_kernel.in_use() == "FlashAttention-3" and current_flash_attention_impl() == "FA3"
    restore_flash_attention_impl(_raise_warn=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 0))
    assert choose(works) is None and current_flash_attention_impl() is None


@pytest.mark.parametrize(
    ("code", "fails", "why"),
    [
        (BROKEN, works, "ImportError: flash_attn_3.so: undefined symbol"),
        ("", works, "does not expose FA3 forward kernels"),
        (WORKING, lambda: "it does not give what attention row by row gives", "row by row"),
    ],
)
def test_where_it_does_not_work_the_start_says_why(package: Path, code: str, fails, why: str) -> None:
    package.write_text(code)
    said = choose(fails)
    assert said is not None and why in said
    assert flash_kernel.in_use() == "FlashAttention-2" and current_flash_attention_impl() is None


@pytest.mark.parametrize("others", ["FlashAttention-2", "FlashAttention-3"])
def test_ranks_use_one_kernel(package: Path, monkeypatch: pytest.MonkeyPatch, others: str) -> None:
    """On a node of the others the package may be missing, or not work."""
    package.write_text(WORKING)
    no_gpu(monkeypatch, present=True)
    monkeypatch.setattr(attention, "_flash_differs", works_in_every_way)
    for works_there in (True, False):
        asked = []

        def gather(value: str | bool, asked=asked, works_there=works_there) -> list[str | bool]:
            asked.append(value)
            return [value, works_there if isinstance(value, bool) else others]

        assert all_pack_rows(OPEN, FAMILIES["llama"], gather) == works_there
        assert asked == ["FlashAttention-3", True] and flash_kernel.in_use() == others
        attention.why_not_faster.cache_clear()
