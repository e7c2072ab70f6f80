"""What every rank does where a model is loaded in shards."""

from __future__ import annotations

import gc
import json
from pathlib import Path

import torch

from models import distributed
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


def parts(rank: int, ranks: int, store: str, folder: str) -> None:
    """Load the model in ``folder``, and write to ``folder``/RANK.json its fingerprint, the peak of this
    process's memory above what it had before, in bytes, and how many tensors were sent."""
    world = join(rank, ranks, store)
    sent, broadcast = [], distributed.dist.broadcast
    distributed.dist.broadcast = lambda tensor, src: (sent.append(src), broadcast(tensor, src=src))
    load_sharded(settings(folder), world)  # imports what is needed
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = peak()
    _, fingerprint = load_sharded(settings(folder), world)
    said = {"fingerprint": fingerprint, "bytes": peak() - before, "sent": len(sent)}
    (Path(folder) / f"{rank}.json").write_text(json.dumps(said))
    torch.distributed.destroy_process_group()


def peak() -> int:
    """The most memory that this process had, mapped files included, in bytes."""
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) * 1024
