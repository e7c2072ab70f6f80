"""Attention over rows packed end to end, each row for itself, without a mask.

transformers keeps packed rows apart too (it finds them by their positions), but with a boolean mask of [N, N]
for N tokens in all, and it computes every pair. Here a row attends to itself alone: by the flash kernel for
uneven lengths on a GPU in half precision, row by row elsewhere.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence as Seq
from functools import cache, partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, PretrainedConfig
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

from common.errors import require
from config.schema_model import ModelConfig
from models.simulated import has_gpu, on_gpu, simulates_gpu

PACKED = "packed_rows"
MODEL_TYPES = (
    *("llama", "qwen2", "qwen3", "mistral", "gemma", "phi", "phi3", "olmo", "olmo2", "smollm3", "starcoder2"),
    *("gpt_neox", "gpt2", "gpt_bigcode", "granite", "cohere", "glm", "glm4", "arcee", "apertus", "helium"),
    *("ernie4_5", "seed_oss", "hunyuan_v1_dense", "persimmon"),
    *("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "phimoe", "granitemoe"),
)
"""Architectures that hand the rows' limits down to their attention, each with a test
(tests/unit/models/test_families.py). In any other the kernel would not see where rows end, so packed rows
take transformers' own way there."""
KEPT_APART = (*MODEL_TYPES, "cohere2", "gemma2", "gemma3_text", "olmo3")
"""Architectures in which transformers itself finds packed rows by their positions, each with a test
(test_families.py). Some others do not look (OPT, GPT-OSS, Falcon), have no positions (BLOOM, MPT), or carry a
state over from row to row (Mamba): there a row would read its neighbours, so packing is refused."""

GROUPED = "enable_gqa" in inspect.signature(varlen_attn).parameters
"""torch 2.11's takes as many key heads as query heads."""


def packable(found: PretrainedConfig, kernel: str) -> bool:
    """Whether packed rows of this architecture may take this kernel: full attention by sdpa, in an
    architecture with a test."""
    windowed = getattr(found, "sliding_window", None)  # Qwen2-MoE has 0 for none
    full = not windowed and getattr(found, "attn_logit_softcapping", None) is None
    return full and found.model_type in MODEL_TYPES and kernel in ("sdpa", PACKED)


def packs_rows(config: ModelConfig, found: PretrainedConfig) -> tuple[bool, str]:
    """(whether the rows of a microbatch are put end to end, why): model.packing where it is true or false,
    else what is best here.

    Left open, rows are packed where each can attend to itself alone without a mask: not in an architecture
    that this kernel does not take, not with torch.compile, which would cut every layer in two there, and on a
    GPU only if it has the kernel for uneven lengths. ``found`` is the architecture; no weights are needed.
    Raises ConfigError for model.packing=true in an architecture of which it is not known that packed rows are
    kept apart.
    """
    require(
        not config.packing or found.model_type in KEPT_APART,
        "model.packing",
        "true",
        f"packed rows of this architecture ({found.model_type}) would read each other, or are not known not "
        "to; use null or false, which pads them",
    )
    if config.packing is not None:
        return config.packing, f"model.packing={str(config.packing).lower()}"
    if not packable(found, config.attn_implementation):
        return False, f"{found.model_type} with {config.attn_implementation} has no packed attention here"
    if config.compile:
        return False, "model.compile=true"
    if has_gpu():
        if config.dtype == "float32":
            return False, "model.dtype=float32: this GPU's kernel for uneven lengths takes bfloat16 alone"
        if not simulates_gpu() and (why := flash_fails()) is not None:
            return False, f"this GPU has no working kernel for uneven lengths: {why}"
    return True, "no padding is computed"


@cache
def flash_fails() -> str | None:
    """Why the kernel for uneven lengths cannot be used here, or None: whether it runs, forward and backward,
    and gives what sdpa gives row by row is tried once, on two rows of bfloat16."""
    lengths, generator = [3, 6], torch.Generator().manual_seed(0)
    start = torch.randn(3, 1, 2, sum(lengths), 64, generator=generator).bfloat16().cuda()
    limits, results = row_limits(lengths, start.device)["cu_seq_lens_q"], []
    try:
        for kernel in (
            partial(_flash, limits=limits, longest=max(lengths)),
            partial(_row_by_row, lengths=RowLengths(lengths)),
        ):
            q, k, v = (part.clone().requires_grad_() for part in start)
            out = kernel(q, k, v, scaling=None)
            results.append([out, *torch.autograd.grad(out.square().sum(), (q, k, v))])
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    same = all(torch.allclose(a, b, rtol=0.05, atol=0.05) for a, b in zip(*results, strict=True))
    return None if same else "it does not give what attention row by row gives"


class RowLengths:
    """How long each row is, tokens. An object of its own: a layer compiled by torch.compile would be compiled
    again for every other tuple of numbers."""

    def __init__(self, lengths: Seq[int]) -> None:
        self.tokens = tuple(lengths)


def row_limits(lengths: Seq[int], device: torch.device) -> dict[str, Any]:
    """What a model's forward hands down to ``attend`` for rows of these lengths (tokens): where each begins,
    the longest, and all. On the device and on the host, so that neither has to wait for the other."""
    limits = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return {
        "cu_seq_lens_q": limits.to(device, non_blocking=True),
        "max_length_q": max(lengths),
        "row_lengths": RowLengths(lengths),
    }


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int = 0,
    row_lengths: RowLengths | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """[B, L, H, d] causal attention of query [B, H, L, d] to key and value [B, H', L, d]. With
    ``cu_seq_lens_q`` (row_limits) B is 1 and each row attends to itself; without, it is a padded grid and
    transformers' sdpa. The signature is theirs."""
    if cu_seq_lens_q is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **others
        )
    if on_gpu(query) and query.dtype in (torch.bfloat16, torch.float16):
        return _flash(query, key, value, cu_seq_lens_q, max_length_q, scaling), None
    assert row_lengths is not None
    return _row_by_row(query, key, value, row_lengths, scaling), None


@torch.compiler.disable
def _row_by_row(
    query: Tensor, key: Tensor, value: Tensor, lengths: RowLengths, scaling: float | None
) -> Tensor:
    parts, grouped = [], query.shape[1] != key.shape[1]
    # split, not slices: the backward of a slice fills a gradient as long as all rows, for every row.
    for q, k, v in zip(*(x.split(lengths.tokens, dim=2) for x in (query, key, value)), strict=True):
        parts.append(
            F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=grouped)
        )
    return torch.cat(parts, dim=2).transpose(1, 2)


def _flash(
    query: Tensor, key: Tensor, value: Tensor, limits: Tensor, longest: int, scaling: float | None
) -> Tensor:
    groups = query.shape[1] // key.shape[1]
    more: dict[str, Any] = {}
    if groups > 1 and GROUPED:
        more["enable_gqa"] = True
    elif groups > 1:
        key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
    # The window (everything before, nothing after) is how this kernel says causal.
    out = varlen_attn(q, k, v, limits, limits, longest, longest, scale=scaling, window_size=(-1, 0), **more)
    return cast(Tensor, out)[None]


AttentionInterface.register(PACKED, attend)
