"""The flash kernel of a GPU: FlashAttention-3 where it is installed and computes what attention row by row
gives, else torch's own. torch's registry of kernels is the real one; the package and the GPU are
stand-ins."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch.nn.attention import current_flash_attention_impl, restore_flash_attention_impl

from benchmarks.steps import llama
from models import attention, flash_kernel
from models.attention import Heads, all_pack_rows, flash_fails, heads_of, packs_rows
from models.flash_kernel import choose
from tests.unit.models.test_compiled_packing import kernel  # noqa: F401 (a fixture)
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
        assert flash_fails(heads_of(FAMILIES["llama"]), shared) is None
    for settings in (OPEN, replace(OPEN, packing=True)):
        packed, said = packs_rows(settings, FAMILIES["llama"])
        name = "FlashAttention-2 (flash-attn-3 is installed but" if wrong else "FlashAttention-3"
        assert packed and f"by {name}" in said
    assert current_flash_attention_impl() == (None if wrong else "FA3")
    assert "by Flash" not in packs_rows(replace(OPEN, packing=True, dtype="float32"), FAMILIES["llama"])[1]


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("heads", [(28, 4, 128), (5, 5, 20)])
def test_the_model_s_own_heads_are_tried(
    package: Path, monkeypatch: pytest.MonkeyPatch, heads: Heads
) -> None:
    """torch's kernel refuses heads of other sizes than multiples of 8; then rows are padded."""
    no_gpu(monkeypatch, present=True)
    flash, seen = attention._flash, []

    def refused(query, key, value, limits, longest, scaling):
        seen.append((query.shape[1], key.shape[1], query.shape[-1]))
        if query.shape[-1] % 8:
            raise RuntimeError("head_size must be a multiple of 8")
        return flash(query, key, value, limits, longest, scaling)

    monkeypatch.setattr(attention, "flash_fails", flash_fails)
    monkeypatch.setattr(attention, "_flash", refused)
    queries, keys, size = heads
    found = llama(500, queries * size, 2, queries, keys, 128)
    packed, said = packs_rows(OPEN, found)
    assert set(seen) == {heads}
    assert packed == (size % 8 == 0) and (packed or "head_size must be a multiple of 8" in said)


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
