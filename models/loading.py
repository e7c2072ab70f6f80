"""Loading of a model's files into a sharded policy, of which every rank reads its part alone."""

from __future__ import annotations

from typing import Any

import torch
from transformers.core_model_loading import WeightConverter

from common.progress import phase
from config.schema_model import ModelConfig
from models.distributed import World, on_every_rank, on_main
from models.fingerprint import weights_fingerprint
from models.policy import Policy, causal_lm, decoder_blocks
from models.pretrained import check_finite, empty_policy, load_policy
from models.sharding import fill, shard
from models.weight_files import FLOATS, stored_tensors


def load_sharded(config: ModelConfig, world: World, seed: int = 0) -> tuple[Policy, str]:
    """Return (the policy, sharded over the ranks; the fingerprint of its weights). Raises ConfigError on
    every rank if there are no weights, or none that are finite.

    A single rank loads to its device. With several ranks, each reads its part of the files. Where weights are
    made of those in the files, or are new, or a rank does not have the files, rank 0 alone reads them on the
    CPU and sends them one at a time. ``seed`` is that of random weights: of adapters, or of a model that has
    none yet.
    """
    with phase("load the model", "model.name_or_path"):
        return _load_sharded(config, world, seed)


def _load_sharded(config: ModelConfig, world: World, seed: int) -> tuple[Policy, str]:
    dtype = getattr(torch, config.dtype)
    if world.size == 1:
        policy = load_policy(config, world.device, seed)
        fingerprint = weights_fingerprint(policy.named_parameters())
        shard(policy, decoder_blocks(policy), world, dtype, config.reshard_after_forward)
        return policy, fingerprint
    whole: dict[str, Any] = {}

    def read() -> tuple[bool, bool]:
        stored = stored_alike(config)
        policy = load_policy(config, torch.device("cpu"), seed, stored)
        whole.update(policy.state_dict())
        model = causal_lm(policy.model)
        untied = getattr(model.config.get_text_config(), "tie_word_embeddings", None) is False
        computed = any(isinstance(c, WeightConverter) for c in getattr(model, "_weight_conversions", ()))
        return untied, stored is not None and not computed

    untied, lies_there = on_main(read)
    everywhere = all(on_every_rank(lambda: lies_there and stored_alike(config) is not None))
    if everywhere:
        on_every_rank(lambda: None if world.is_main else read())
    policy = empty_policy(config, untied=untied)
    shard(policy, decoder_blocks(policy), world, dtype, config.reshard_after_forward)
    fill(policy, whole, world, sends=not everywhere)
    whole.clear()
    on_every_rank(lambda: check_finite(policy, config))
    return policy, weights_fingerprint(policy.named_parameters())


def stored_alike(config: ModelConfig) -> torch.dtype | None:
    """Return the dtype of all weights in the model's files, where these are the policy's own but for the
    dtype. Then they can stay in the files, which safetensors maps, until a part of them is read. None where
    weights are computed (``model.new_tokens``, ``model.quantization``, a head, adapters over another dtype),
    where dtypes differ, and where not all files are on this machine."""
    if config.from_config or config.new_tokens or config.head or config.quantization:
        return None
    # float64 is trained as float32, which rounds it
    dtypes = {
        None if tensor.dtype == "F64" else FLOATS.get(tensor.dtype)
        for tensor in (stored_tensors(config) or {}).values()
    }
    dtype = getattr(torch, dtypes.pop() or "", None) if len(dtypes) == 1 else None
    return None if config.use_peft and dtype != getattr(torch, config.dtype) else dtype
