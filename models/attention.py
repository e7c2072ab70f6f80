"""Attention over rows packed end to end, in which each row attends only to itself, without a mask.

transformers keeps packed rows apart too (it finds them by their positions), but with a boolean mask of [N, N]
for N tokens in all, and it computes every pair. Here a row's attention covers that row alone. On a GPU in
half precision the flash kernel for uneven lengths computes it; elsewhere rows are computed one by one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import cache, partial
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from common.errors import ConfigError
from config.schema_model import ModelConfig
from data.batches import to_device
from data.types import PackedRows

PACKED = "packed_rows"
DECODING = "grouped_decoding"
MODEL_TYPES = (
    *("llama", "qwen2", "qwen3", "mistral", "gemma", "phi", "phi3", "olmo", "olmo2", "smollm3", "starcoder2"),
    *("gpt_neox", "gpt2", "gpt_bigcode", "granite", "cohere", "glm", "glm4", "arcee", "apertus", "helium"),
    *("ernie4_5", "seed_oss", "hunyuan_v1_dense", "persimmon"),
    *("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "phimoe", "granitemoe"),
)
"""Architectures that pass the rows' limits down to their attention, each with a test
(tests/unit/models/test_families.py). In any other the kernel would not see where rows end, so packed rows use
transformers' own attention there."""
KEPT_APART = (*MODEL_TYPES, "cohere2", "gemma2", "gemma3_text", "olmo3")
"""Architectures in which transformers itself finds packed rows by their positions, each with a test
(test_families.py). Some others ignore positions (OPT, GPT-OSS, Falcon), have none (BLOOM, MPT), or carry a
state from row to row (Mamba): there a row would read its neighbours, so packing is refused."""

Heads = tuple[int, int, int]
"""Number of query heads, of key heads, and of numbers in a head."""

GROUPED = "enable_gqa" in inspect.signature(varlen_attn).parameters
"""Whether the kernel supports fewer key heads than query heads; torch 2.11's requires as many of both."""


def heads_of(hf_config: PretrainedConfig) -> Heads:
    """Return the heads of this architecture's attention."""
    text = hf_config.get_text_config()
    heads = getattr(text, "num_attention_heads", None) or 1
    keys = getattr(text, "num_key_value_heads", None) or heads
    return heads, keys, getattr(text, "head_dim", None) or text.hidden_size // heads


def packable(hf_config: PretrainedConfig, kernel: str) -> bool:
    """Return whether packed rows of this architecture may use this kernel: full attention by sdpa, in an
    architecture with a test."""
    windowed = getattr(hf_config, "sliding_window", None)  # Qwen2-MoE has 0 for none
    full = not windowed and getattr(hf_config, "attn_logit_softcapping", None) is None
    return full and hf_config.model_type in MODEL_TYPES and kernel in ("sdpa", PACKED)


def packs_rows(config: ModelConfig, hf_config: PretrainedConfig) -> tuple[bool, str]:
    """Return (whether the rows of a microbatch are packed end to end, the reason): model.packing where it is
    true or false, else the best choice here.

    If model.packing is unset, rows are packed where each can attend to itself alone without a mask. Rows are
    not packed in an architecture that this kernel does not support, nor with torch.compile on a CPU, where
    attention row by row would cut every layer in two, nor on a GPU that lacks the kernel for uneven lengths.
    ``hf_config`` is the architecture; no weights are needed. Raises ConfigError for model.packing=true in an
    architecture that is not known to keep packed rows apart.
    """
    if config.packing and hf_config.model_type not in KEPT_APART:
        raise ConfigError(
            "model.packing",
            "true",
            f"packed rows of this architecture ({hf_config.model_type}) would read each other, or are not "
            "known not to; use auto or false, which pads them",
        )
    if config.packing is not None:
        return config.packing, f"model.packing={str(config.packing).lower()}"
    if not packable(hf_config, config.attn_implementation):
        return False, f"{hf_config.model_type} with {config.attn_implementation} has no packed attention here"
    if config.compile and not torch.cuda.is_available():
        return False, "model.compile=true"
    if torch.cuda.is_available():
        if config.dtype == "float32":
            return False, "model.dtype=float32: this GPU's kernel for uneven lengths takes bfloat16 alone"
        fails = flash_fails(heads_of(hf_config), compiled=config.compile)
        if fails is not None:
            return False, f"this GPU has no working kernel for uneven lengths: {fails}"
    return True, "no padding is computed"


def all_pack_rows(
    config: ModelConfig, hf_config: PretrainedConfig, gather: Callable[[Any], list[Any]]
) -> bool:
    """Return whether rows are packed on every rank: a kernel may work on one node's GPUs and not on others.
    ``gather`` returns the values that all ranks give it; a collective."""
    return all(gather(packs_rows(config, hf_config)[0]))


@cache
def flash_fails(heads: Heads, shared: bool = False, compiled: bool = False) -> str | None:
    """Return why the kernel for uneven lengths cannot compute attention of these heads here, or None. The
    kernel is tried once, forward and backward, on two rows of bfloat16, and must give what sdpa gives row by
    row. With ``shared``, a third row reads the first one's prompt. With ``compiled``, torch.compile makes its
    call."""
    rows = PackedRows((3, 6, 4), ((0, 0), (0, 0), (0, 2))) if shared else PackedRows((3, 6), ((0, 0),) * 2)
    generator, results = torch.Generator().manual_seed(0), []
    queries, keys, size = heads
    shape = 1, queries + 2 * keys, sum(rows.lengths), size
    drawn = torch.randn(shape, generator=generator).bfloat16().cuda()
    arguments = row_limits(rows, drawn.device)
    limits = arguments["cu_seq_lens_q"], arguments.get("cu_seq_lens_k", arguments["cu_seq_lens_q"])
    longest = arguments["max_length_q"], arguments.get("max_length_k", arguments["max_length_q"])
    flash = torch.compile(_flash, dynamic=True, fullgraph=True) if compiled else _flash
    try:
        for kernel in (
            partial(flash, limits=limits, longest=longest),
            partial(_row_by_row, lengths=arguments["row_lengths"]),
        ):
            q, k, v = (part.clone().requires_grad_() for part in drawn.split((queries, keys, keys), 1))
            read = (_Read.apply(x, arguments["key_places"]) for x in (k, v)) if shared else (k, v)
            with sdpa_kernel(SDPBackend.MATH):
                out = kernel(q, *read, scaling=None)
                results.append([out, *torch.autograd.grad(out.square().sum(), (q, k, v))])
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    same = all(_rounded_alike(a, b) for a, b in zip(*results, strict=True))
    return None if same else "it does not give what attention row by row gives"


def _rounded_alike(actual: Tensor, wanted: Tensor) -> bool:
    """Return whether two tensors of bfloat16 differ by no more than rounding explains. A gradient sums over
    tokens and query heads, so it is rounded relative to its size, and not to that of each element: in
    simulation by up to 0.04 of the root mean square, beyond 5 % of the element. A row that reads its
    neighbour is off by about the root mean square itself."""
    scale = float(wanted.detach().float().square().mean().sqrt())
    return torch.allclose(actual, wanted, rtol=0.05, atol=0.1 * scale)


def shares_prompts(config: ModelConfig, hf_config: PretrainedConfig, packing: bool) -> bool:
    """Return whether rows of a microbatch with the same prompt compute it once: model.share_prompts where it
    is true or false, else wherever they can. ``packing``: whether rows are packed (``packs_rows``). Raises
    ConfigError for model.share_prompts=true where they cannot."""
    if config.share_prompts is False:
        return False
    why = why_not_shared(config, hf_config, packing)
    if why is not None and config.share_prompts is not None:
        raise ConfigError("model.share_prompts", "true", f"{why}: use false")
    return why is None


def why_not_shared(config: ModelConfig, hf_config: PretrainedConfig, packing: bool) -> str | None:
    """Return why packed rows of this model cannot share a prompt, or None. On a GPU its kernel is tried
    once."""
    if not packing:
        return f"rows are padded ({packs_rows(config, hf_config)[1]})"
    if not packable(hf_config, config.attn_implementation):
        kernel = f"{hf_config.model_type} with {config.attn_implementation}"
        return f"{kernel} keeps packed rows apart by a mask that knows of no shared prompt"
    if config.router_aux_loss_coef is not None:
        return "the routers' auxiliary loss (model.router_aux_loss_coef) counts the prompt of every row"
    if config.head == "reward":
        return "a reward model reads a row's reward where its own tokens end"
    if torch.cuda.is_available():
        fails = flash_fails(heads_of(hf_config), True, config.compile)
        return None if fails is None else f"this GPU's kernel for uneven lengths cannot: {fails}"
    return None


class RowLengths:
    """Number of tokens of each row, and of the keys that it reads. This is an object instead of a tuple
    because torch.compile would compile a layer again for every new tuple of numbers."""

    def __init__(self, queries: Seq[int], keys: Seq[int]) -> None:
        self.queries = tuple(queries)
        self.keys = tuple(keys)
        self._masks: dict[tuple[int, int], Tensor] = {}

    def mask(self, queries: int, keys: int, device: torch.device) -> Tensor:
        """Return [queries, keys] bool: a token reads all keys up to its own; the keys of the row's own tokens
        are the last ones."""
        if (queries, keys) not in self._masks:
            everything = torch.ones(queries, keys, dtype=torch.bool, device=device)
            self._masks[queries, keys] = everything.tril(keys - queries)
        return self._masks[queries, keys]


def row_limits(rows: PackedRows, device: torch.device) -> dict[str, Any]:
    """Return the arguments that a model's forward passes down to ``attend`` for these rows: where each row
    begins, the longest length, and all lengths. If a prompt is shared, they include the same for the keys
    that each row reads, and the places of these keys. The numbers are on the device and on the host, so that
    neither waits for the other."""
    keys = [count + length for length, (_, count) in zip(rows.lengths, rows.prompts, strict=True)]
    limits = {
        "cu_seq_lens_q": to_device(_limits(rows.lengths), device),
        "max_length_q": max(rows.lengths),
        "row_lengths": RowLengths(rows.lengths, keys),
    }
    if not rows.shares:
        return limits
    return limits | {
        "cu_seq_lens_k": to_device(_limits(keys), device),
        "max_length_k": max(keys),
        "key_places": _key_places(rows, device),
    }


def _limits(lengths: Seq[int]) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def _key_places(rows: PackedRows, device: torch.device) -> Tensor:
    """Return [sum of the rows' keys] int64, the places of the tokens that each row reads, row after row."""
    places, start = [], 0
    for length, (first, count) in zip(rows.lengths, rows.prompts, strict=True):
        places += [np.arange(first, first + count), np.arange(start, start + length)]
        start += length
    return to_device(torch.from_numpy(np.concatenate(places)), device)


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
    cu_seq_lens_k: Tensor | None = None,
    max_length_k: int = 0,
    key_places: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Return [B, L, H, d], causal attention of query [B, H, L, d] to key and value [B, H', L, d]. With
    ``cu_seq_lens_q`` (row_limits) B is 1 and each row attends to itself, and with ``key_places`` also to the
    prompt that another row computes for it. Without ``cu_seq_lens_q`` the input is a padded grid, for which
    transformers' sdpa is used. The signature is that of transformers."""
    if cu_seq_lens_q is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **others
        )
    if key_places is not None:
        key, value = _Read.apply(key, key_places), _Read.apply(value, key_places)
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
        limits = cu_seq_lens_q, cu_seq_lens_q if cu_seq_lens_k is None else cu_seq_lens_k
        return _flash(query, key, value, limits, (max_length_q, max_length_k or max_length_q), scaling), None
    assert row_lengths is not None
    return _row_by_row(query, key, value, row_lengths, scaling), None


class _Read(torch.autograd.Function):
    """Select from [1, H, L, d] the tokens at ``places`` [K], as [1, H, K, d]. A token that several rows read
    gets the sum of their gradients, added in float32 at least, whatever the number of rows."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        ctx.shape = tokens.shape
        return tokens.index_select(2, places)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (places,) = ctx.saved_tensors
        total = torch.zeros(
            ctx.shape, dtype=torch.promote_types(grad.dtype, torch.float32), device=grad.device
        )
        return total.index_add_(2, places, grad.to(total.dtype)).to(grad.dtype), None


@torch.compiler.disable
def _row_by_row(
    query: Tensor, key: Tensor, value: Tensor, lengths: RowLengths, scaling: float | None
) -> Tensor:
    parts, grouped = [], query.shape[1] != key.shape[1]
    # split instead of slices: the backward of each slice would fill a gradient as long as all rows.
    splits = (query.split(lengths.queries, dim=2), *(x.split(lengths.keys, dim=2) for x in (key, value)))
    for q, k, v in zip(*splits, strict=True):
        alone = q.shape[2] == k.shape[2]
        parts.append(
            F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=None if alone else lengths.mask(q.shape[2], k.shape[2], q.device),
                is_causal=alone,
                scale=scaling,
                enable_gqa=grouped,
            )
        )
    return torch.cat(parts, dim=2).transpose(1, 2)


def _flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    limits: tuple[Tensor, Tensor],
    longest: tuple[int, int],
    scaling: float | None,
) -> Tensor:
    """Compute ``attend`` with the flash kernel. ``limits`` and ``longest``: of the queries, and of the
    keys."""
    groups = query.shape[1] // key.shape[1]
    more: dict[str, Any] = {}
    if groups > 1 and GROUPED:
        more["enable_gqa"] = True
    elif groups > 1:
        key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
    # A window of everything before and nothing after makes this kernel causal. Where there are more keys than
    # queries, the last query is aligned with the last key, which ``flash_fails`` tests.
    out = varlen_attn(q, k, v, *limits, *longest, scale=scaling, window_size=(-1, 0), **more)
    return cast(Tensor, out)[None]


def decode(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **others: Any
) -> tuple[Tensor, None]:
    """Return [B, L, H, d], transformers' sdpa of query [B, H, L, d] to key and value [B, H', S, d]. Where
    every row has one new token, the H / H' query heads of a key head are that head's L: transformers would
    copy all keys and values for each of them, at each token."""
    heads, keys = query.shape[1], key.shape[1]
    if query.shape[2] > 1 or heads == keys or others.get("position_bias") is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **others)
    out = F.scaled_dot_product_attention(
        query.unflatten(1, (keys, heads // keys)).squeeze(3),
        key,
        value,
        attn_mask=attention_mask,
        scale=others.get("scaling"),
    )
    return out.flatten(1, 2)[:, None], None


AttentionInterface.register(PACKED, attend)
AttentionInterface.register(DECODING, decode)
AttentionMaskInterface.register(DECODING, sdpa_mask)
