"""Ranks that decode together run as many forwards, and none of them passes the model's positions."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import torch

from models.distributed import World, start
from models.policy import decoder_blocks
from models.sharding import shard
from rollouts.embedded import EmbeddedSampler
from rollouts.samplers import Continuation, Sample, SamplingSettings
from tests.distributed.joining import join
from tests.programs import in_ranks
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
    world = join(rank, ranks, store)
    samples = drawn(rank, world, synced=True)
    Path(folder, f"{rank}.samples").write_bytes(pickle.dumps([one.token_ids for one in samples]))


def test_ranks_with_more_and_less_room_draw_what_one_process_does(tmp_path: Path) -> None:
    in_ranks(worker, (2, str(tmp_path / "store"), str(tmp_path)), 2)
    world = start()
    for rank in range(2):
        found = pickle.loads((tmp_path / f"{rank}.samples").read_bytes())
        assert found == [one.token_ids for one in drawn(rank, world, synced=False)]
        assert max(map(len, found)) > 1
