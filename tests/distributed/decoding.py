"""What two ranks decode with a sharded policy that has a table of positions."""

from __future__ import annotations

import os
import pickle
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from models.distributed import World, start
from models.policy import decoder_blocks
from models.sharding import shard
from rollouts.embedded import EmbeddedSampler
from rollouts.samplers import Continuation, Sample, SamplingSettings
from tests.programs import HANG
from tests.unit.models.test_families import tiny

END = 64
SIZES = ((END - 2, END - 5, END - 9), (6, 30, 9, END - 20, 6))
"""Tokens of each rank's prompts: the rows of the first rank have little room, those of the second much. The
second has a batch more, of two rows with one prompt."""


def rows(rank: int) -> list[Continuation]:
    return [
        Continuation(f"{rank}", i, np.random.default_rng((rank, size)).integers(3, 40, size), END - size)
        for i, size in enumerate(SIZES[rank])
    ]


def drawn(rank: int, world: World, synced: bool) -> list[Sample]:
    policy = tiny("opt").eval()
    if synced:
        shard(policy, decoder_blocks(policy), world, torch.float32, True)
    sampler = EmbeddedSampler(policy, None, world, batch_size=3)  # type: ignore[arg-type]
    return sampler.draw(rows(rank), SamplingSettings(0.9, 0.95, END), 1, (58,))


def worker(rank: int, ranks: int, store: str, folder: str) -> None:
    """Write this rank's samples to ``rank``.samples."""
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), TORCHELASTIC_RUN_ID="test")
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, ranks),
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=HANG),
    )
    samples = drawn(rank, start(), synced=True)
    Path(folder, f"{rank}.samples").write_bytes(pickle.dumps([one.token_ids for one in samples]))
