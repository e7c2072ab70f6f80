"""The flash kernel of a GPU: FlashAttention-3 where it is installed and computes what attention row by row
gives, else torch's own. torch's registry of kernels is the real one; the package and the GPU are
stand-ins."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.nn.attention import current_flash_attention_impl, restore_flash_attention_impl

from models import attention, flash_kernel
from models.attention import flash_fails, packs_rows
from models.flash_kernel import FlashKernel, choose
from tests.unit.models.test_compiled_packing import kernel  # noqa: F401 (a fixture)
from tests.unit.models.test_families import FAMILIES
from tests.unit.models.test_packing import OPEN, no_gpu

WORKING = """
import torch
lib = torch.library.Library("flash_attn_3", "FRAGMENT")
if not hasattr(torch.ops.flash_attn_3, "fwd"):
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
    cached = attention.flash_kernel, attention._flash_differs
    for one in cached:
        one.cache_clear()
    yield tmp_path / f"{flash_kernel.PACKAGE}.py"
    restore_flash_attention_impl(_raise_warn=False)
    sys.modules.pop(flash_kernel.PACKAGE, None)
    for one in cached:
        one.cache_clear()


def works() -> None:
    return None


def test_it_is_used_where_it_works(package: Path) -> None:
    package.write_text(WORKING)
    seen = []

    def fails() -> None:
        seen.append(current_flash_attention_impl())

    assert str(choose(fails)) == "FlashAttention-3"
    assert seen == ["FA3"] and current_flash_attention_impl() == "FA3"


def test_torchs_own_serves_where_it_is_not_installed(package: Path) -> None:
    assert choose(works) == FlashKernel() and current_flash_attention_impl() is None


def test_other_gpus_keep_torchs_own(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package.write_text(WORKING)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 0))
    assert choose(works) == FlashKernel() and current_flash_attention_impl() is None


@pytest.mark.parametrize(
    ("code", "fails", "why"),
    [
        (BROKEN, works, "ImportError: flash_attn_3.so: undefined symbol"),
        ("", works, "does not expose FA3 kernels"),
        (WORKING, lambda: "it does not give what attention row by row gives", "row by row"),
    ],
)
def test_where_it_does_not_work_the_start_says_why(package: Path, code: str, fails, why: str) -> None:
    if not code and hasattr(torch.ops, "flash_attn_3"):
        code = "raise RuntimeError('does not expose FA3 kernels')"  # another test has made its operators
    package.write_text(code)
    chosen = choose(fails)
    assert chosen.name == "FlashAttention-2" and why in str(chosen)
    assert current_flash_attention_impl() is None


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("wrong", [False, True])
def test_the_start_of_a_run_tries_it(package: Path, monkeypatch: pytest.MonkeyPatch, wrong: bool) -> None:
    """A kernel that lets a row read its neighbour's last token is found, and the other takes its place."""
    package.write_text(WORKING)
    no_gpu(monkeypatch, present=True)
    flash = attention._flash

    def computed(query, key, value, limits, longest, scaling):
        if wrong and current_flash_attention_impl() == "FA3":
            value = value.roll(1, 2)
        return flash(query, key, value, limits, longest, scaling)

    monkeypatch.setattr(attention, "_flash", computed)
    for shared in (False, True):
        assert flash_fails(shared) is None
    packed, said = packs_rows(OPEN, FAMILIES["llama"])
    assert (
        packed
        and ("FlashAttention-2 (flash-attn-3 is installed but" if wrong else "FlashAttention-3") in said
    )
    assert current_flash_attention_impl() == (None if wrong else "FA3")
