"""Two ranks, of which one finds no room: neither waits for the other, and what was saved stays. Then two of
which one writes longer: what it has not finished is not taken for a file of the checkpoint, and the other
waits. Both resume from the same one."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.distributed_c10d import _set_pg_timeout

from models.checkpoint import CheckpointError, Checkpoints
from models.distributed import World
from models.sharding import local
from tests.distributed.joining import in_world
from tests.engine import engine_config, make_segment, make_trainer, run, weights
from tests.full_disk import full_disk
from tests.programs import HANG
from tests.tiny import tiny_policy
from trainers.basic import BasicTrainer


def worker(world: World, folder: Path) -> None:
    rank, config = world.rank, engine_config(folder / "cache", "kto", "model.batch_size=8")
    trainer, _ = run(config, make_segment(config, 8), make_trainer(config, world=world))
    kept = Checkpoints(folder / "checkpoints", world, 1)

    def save(step: int) -> str:
        try:
            kept.save(step, trainer.policy, trainer.optimizer, {}, {"x": torch.zeros(100_000)})
        except CheckpointError as error:
            return str(error)
        return ""

    assert save(1) == ""
    for full in range(world.size):
        for room in (100, 200_000, 390_000):  # of the shards nothing, all; of what a rank alone knows not all
            with full_disk(room if rank == full else 10**9):
                said = save(2)
            assert "step_00000002 could not be written" in said, (full, room, said)
            dist.barrier()
            assert [path.name for path in kept.folder.iterdir()] == ["step_00000001"]
            dist.barrier()
    other = make_trainer(config, tiny_policy(seed=9), world)
    kept.load(kept.path(1), other.policy, other.optimizer)
    found, wanted = weights(other), weights(trainer)
    assert all(torch.equal(local(found[name]), local(wanted[name])) for name in wanted)
    assert save(2) == ""
    dist.barrier()
    assert [path.name for path in kept.folder.iterdir()] == ["step_00000002"]
    dist.barrier()
    # rank 0 is done at once; rank 1's own file is still being written then
    kept.save(3, trainer.policy, trainer.optimizer, {}, {"x": torch.zeros(30_000_000 * rank)})
    assert kept.problem(kept.path(3)) == ""
    files = set(json.loads((kept.path(3) / "manifest.json").read_text()))
    assert files == {path.name for path in kept.path(3).iterdir()} - {"manifest.json"}
    dist.barrier()
    slow_files(kept, trainer, rank)
    if rank == 1:
        kept.all = lambda: []  # type: ignore[method-assign]  # as a network's folder may look for a while
    assert kept.newest_sound() == kept.path(4)


def slow_files(kept: Checkpoints, trainer: BasicTrainer[Any], rank: int) -> None:
    """Write and read a checkpoint where rank 1's files take longer than a collective between devices may."""

    def slow(work: Callable[..., Any]) -> Callable[..., Any]:
        def later(*of: Any) -> Any:
            time.sleep(2 * rank)
            return work(*of)

        return later

    _set_pg_timeout(timedelta(seconds=1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FileSystemWriter, "write_data", slow(FileSystemWriter.write_data))
        patch.setattr(FileSystemReader, "read_data", slow(FileSystemReader.read_data))
        kept.save(4, trainer.policy, trainer.optimizer, {}, {})
        kept.load(kept.path(4), trainer.policy, trainer.optimizer)
    _set_pg_timeout(timedelta(seconds=HANG))


def test_a_rank_without_room_stops_no_other(tmp_path):
    in_world(worker, 2, tmp_path)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_00000004"]
