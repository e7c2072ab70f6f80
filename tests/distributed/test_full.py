"""Two ranks, of which one finds no room: neither waits for the other, and what was saved stays. Then two of
which one writes longer: what it has not finished is not taken for a file of the checkpoint, and the other
waits. Both resume from the same one."""

from __future__ import annotations

from tests.distributed.full import worker
from tests.programs import in_ranks


def test_a_rank_without_room_stops_no_other(tmp_path):
    in_ranks(worker, (2, str(tmp_path / "store"), str(tmp_path)), 2)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_00000006"]
