"""Loading of a model's files into a sharded policy, without every rank holding all of it."""

from __future__ import annotations

from typing import Any

import torch

from common.progress import phase
from config.schema_model import ModelConfig
from models.distributed import World, fill, on_main, shard
from models.fingerprint import weights_fingerprint
from models.policy import Policy, causal_lm, decoder_blocks
from models.pretrained import empty_policy, load_policy


def load_sharded(config: ModelConfig, world: World, seed: int = 0) -> tuple[Policy, str]:
    """Return (the policy, sharded over the ranks; the fingerprint of its weights). Raises ConfigError on
    every rank if there are no weights.

    A single rank loads to its device. With several ranks, rank 0 alone reads the weights, on the CPU, and
    sends every other rank its share. ``seed`` is that of random weights: of adapters, or of a model that has
    none yet.
    """
    with phase("load the model", "model.name_or_path"):
        return _load_sharded(config, world, seed)


def _load_sharded(config: ModelConfig, world: World, seed: int) -> tuple[Policy, str]:
    dtype = getattr(torch, config.dtype)
    if world.size == 1:
        policy = load_policy(config, world.device, seed)
        fingerprint = weights_fingerprint(policy.named_parameters())
        shard(policy, decoder_blocks(policy), world, dtype, config.shards_again)
        return policy, fingerprint
    whole: dict[str, Any] = {}

    def read() -> bool:
        policy = load_policy(config, torch.device("cpu"), seed)
        whole.update(policy.state_dict())
        return getattr(causal_lm(policy.model).config.get_text_config(), "tie_word_embeddings", None) is False

    policy = empty_policy(config, untied=on_main(read))
    shard(policy, decoder_blocks(policy), world, dtype, config.shards_again)
    fill(policy, whole, world.device, tie=causal_lm(policy.model).tie_weights)
    return policy, weights_fingerprint(policy.named_parameters())
