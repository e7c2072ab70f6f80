"""Two ranks, of which one finds no room: neither waits for the other, and what was saved stays."""

from __future__ import annotations

import torch.multiprocessing as mp

from tests.distributed.full import worker


def test_a_rank_without_room_stops_no_other(tmp_path):
    mp.start_processes(worker, (2, str(tmp_path / "store"), str(tmp_path)), nprocs=2, start_method="spawn")
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_00000002"]
