"""Attention over rows packed end to end, each row for itself, without a mask.

transformers keeps packed rows apart too (it finds them by their positions), but with a boolean mask of [N, N] for N tokens in
all, and it computes every pair. Here a row attends to itself alone: by the flash kernel for uneven lengths on a GPU in half
precision, row by row elsewhere.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence as Seq
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

PACKED = "packed_rows"
MODEL_TYPES = ("llama", "qwen2", "mistral", "gpt_neox", "granite", "cohere")
"""Architectures that hand the rows' limits down to their attention, each with a test (tests/unit/models/test_families.py). In any
other the kernel would not see where rows end, so packed rows take transformers' own way there."""

GROUPED = "enable_gqa" in inspect.signature(varlen_attn).parameters
"""torch 2.11's takes as many key heads as query heads."""


def packable(model: PreTrainedModel) -> bool:
    """Whether packed rows of this model may take this kernel: full attention by sdpa, in an architecture with a test."""
    config = model.config
    full = getattr(config, "sliding_window", None) is None and getattr(config, "attn_logit_softcapping", None) is None
    return full and config.model_type in MODEL_TYPES and config._attn_implementation in ("sdpa", PACKED)


def row_limits(lengths: Seq[int], device: torch.device) -> dict[str, Any]:
    """What a model's forward hands down to ``attend`` for rows of these lengths (tokens): where each begins, and the longest."""
    limits = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return {"cu_seq_lens_q": limits.to(device, non_blocking=True), "max_length_q": max(lengths)}


def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
           scaling: float | None = None, dropout: float = 0.0, cu_seq_lens_q: Tensor | None = None, max_length_q: int = 0,
           **others: Any) -> tuple[Tensor, None]:
    """[B, L, H, d] causal attention of query [B, H, L, d] to key and value [B, H', L, d]. With ``cu_seq_lens_q`` (row_limits) B
    is 1 and each row attends to itself; without, it is a padded grid and transformers' sdpa. The signature is theirs."""
    if cu_seq_lens_q is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **others)
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
        return _flash(query, key, value, cu_seq_lens_q, max_length_q, scaling), None
    parts, lengths = [], cu_seq_lens_q.diff().tolist()
    # split, not slices: the backward of a slice fills a gradient as long as all rows, for every row.
    for q, k, v in zip(*(x.split(lengths, dim=2) for x in (query, key, value)), strict=True):
        parts.append(F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=q.shape[1] != k.shape[1]))
    return torch.cat(parts, dim=2).transpose(1, 2), None


def _flash(query: Tensor, key: Tensor, value: Tensor, limits: Tensor, longest: int, scaling: float | None) -> Tensor:
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
