"""How much device memory a run will take, counted before anything is loaded."""

from __future__ import annotations

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from config.schema_model import ModelConfig
from data.batches import Segment, cut, size_of
from models.attention import packs_rows
from models.logprobs import BUDGET
from models.pretrained import resolve_model_path

GIB = 2.0**30
ACTIVATION_BYTES = {True: 2, False: 34}
"""Bytes kept for backward, per token, layer and hidden unit at two bytes a number: a block's input alone
where activations are recomputed, else about 34 (Korthikanti et al. 2022, equation 2, without the attention
matrix that fused kernels never write)."""


def estimate_memory(config: ModelConfig, plan: Segment, rows_per_example: int, ranks: int) -> str:
    """A sentence a part: parameters, weights and optimizer, activations of the widest microbatch of the first
    batch, GiB a rank.

    An estimate: the allocator's fragments, attention workspaces and communication buffers are not in it.
    """
    model_config = AutoConfig.from_pretrained(
        resolve_model_path(config.name_or_path),
        revision=config.revision,
        trust_remote_code=config.trust_remote_code,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config, trust_remote_code=config.trust_remote_code)
    parameters = sum(p.numel() for p in model.parameters())
    width = 4 if config.dtype == "float32" else 2
    size = size_of(config, ranks)
    packing, _ = packs_rows(config, model_config)
    micros = cut(plan.batch(0), 0, ranks, size or 1, rows_per_example, packing)
    tokens = max(
        sum(of) if packing else len(of) * max(of)
        for of in ([len(row) for e in micro for row in e.rows] for micro in micros)
    )
    text = model_config.get_text_config()
    logits = 8 * BUDGET["cuda" if torch.cuda.is_available() else "cpu"]
    states = parameters * 16 / ranks if not config.use_peft else parameters * width / ranks
    gathered = parameters * width / text.num_hidden_layers
    kept = (
        tokens
        * text.num_hidden_layers
        * text.hidden_size
        * ACTIVATION_BYTES[config.activation_checkpointing]
        * width
        / 2
    )
    total = states + gathered + kept + logits
    return (
        f"{parameters / 1e6:,.1f} M parameters on {ranks} rank(s). Estimated memory a rank: "
        f"{total / GIB:.2f} GiB = "
        f"{states / GIB:.2f} weights, gradients and AdamW (float32, sharded) + {gathered / GIB:.2f} a "
        f"gathered block + {kept / GIB:.2f} "
        f"activations of {tokens:,} tokens + {logits / GIB:.2f} logits of a chunk. No second model: the "
        "reference has no weights."
    )
