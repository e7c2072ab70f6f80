"""What every rank does where a model is loaded in shards."""

from __future__ import annotations

from pathlib import Path

import torch

from models.export import full_state
from models.loading import load_sharded
from models.policy import causal_lm
from tests.distributed.joining import join
from tests.unit.models.test_policy import settings


def spread(rank: int, ranks: int, store: str, folder: str) -> None:
    """Load the model in ``folder``; rank 0 writes the weights of all shards to ``folder``/state.pt."""
    world = join(rank, ranks, store)
    policy, _ = load_sharded(settings(folder), world)
    assert causal_lm(policy.model).config.tie_word_embeddings is False
    state = full_state(policy)
    if rank == 0:
        torch.save(state, Path(folder) / "state.pt")
    torch.distributed.destroy_process_group()
