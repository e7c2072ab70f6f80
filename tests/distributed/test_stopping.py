"""Two ranks, of which only one is asked to stop: both stop at once, and nothing is lost."""

from __future__ import annotations

import json

from tests.distributed.stopping import PARTS, worker
from tests.programs import in_ranks


def test_ranks_stop_together_within_a_phase_where_one_is_asked(tmp_path):
    in_ranks(worker, (2, str(tmp_path), " ".join(PARTS)), 2)
    after = json.loads((tmp_path / "counts-1.json").read_text())
    assert after.keys() == PARTS.keys()
    assert all(count <= 2 for count in after.values()), after
