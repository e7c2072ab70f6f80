"""Ranks that decode together run as many forwards, and none of them passes the model's positions."""

from __future__ import annotations

import pickle
from pathlib import Path

from models.distributed import start
from tests.distributed.decoding import drawn, worker
from tests.programs import in_ranks


def test_ranks_with_more_and_less_room_draw_what_one_process_does(tmp_path: Path) -> None:
    in_ranks(worker, (2, str(tmp_path / "store"), str(tmp_path)), 2)
    world = start()
    for rank in range(2):
        found = pickle.loads((tmp_path / f"{rank}.samples").read_bytes())
        assert found == [one.token_ids for one in drawn(rank, world, synced=False)]
        assert max(map(len, found)) > 1
