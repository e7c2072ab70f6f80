"""Replicas of the sharded model (HSDP): gradients cross from one to the other once a step, however many turns
it has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from data.batches import Segment
from tests.distributed.cells import uneven_groups
from tests.distributed.joining import join
from tests.engine import engine_config, make_trainer, run, weights
from tests.programs import in_ranks

TURNS = (1, 2, 4)


def worker(rank: int, store: str, folder: str) -> None:
    """One of two ranks, each a replica of its own: two updates in so many turns each."""
    world = join(rank, 2, store, replicas=2)
    found: dict[str, np.ndarray] = {}
    sent: list[int] = []
    reduce = dist.all_reduce

    def counted(tensor: torch.Tensor, *rest: Any, **keywords: Any) -> Any:
        sent.append(tensor.numel())
        return reduce(tensor, *rest, **keywords)

    dist.all_reduce = counted  # what FSDP2 calls
    for turns in TURNS:
        words = ("model.batch_size=8", f"model.microbatches={turns}", "lr=0.003")
        config = engine_config(Path(folder) / "cache", "dpo", *words)
        trainer, segment = make_trainer(config, world=world), Segment(uneven_groups("pairs"), 8, 16, seed=0)
        sent.clear()
        run(config, segment, trainer)
        found[f"reductions {turns}"] = np.array(len(sent))
        found[f"weights {turns}"] = torch.cat([w.flatten() for w in weights(trainer).values()]).numpy()
    if rank == 0:
        np.savez(Path(folder) / "found.npz", **found)
    dist.destroy_process_group()


def test_gradients_cross_between_replicas_once_a_step(tmp_path):
    in_ranks(worker, (str(tmp_path / "store"), str(tmp_path)), 2)
    found = np.load(tmp_path / "found.npz")
    counts = [int(found[f"reductions {turns}"]) for turns in TURNS]
    assert counts[0] >= 2 * 3 and counts[0] == counts[1] == counts[2], "two steps of two blocks and the root"
    for turns in TURNS[1:]:
        np.testing.assert_allclose(found[f"weights {turns}"], found["weights 1"], rtol=0, atol=2e-5)
