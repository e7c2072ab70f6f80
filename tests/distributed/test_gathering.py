"""With model.reshard_after_forward=auto layers stay gathered until their backward where the memory plan finds
room, and the run is the same to the bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.distributed.gathering import worker
from tests.programs import in_ranks

STAY = "layers stay gathered from their forward to their backward (model.reshard_after_forward=auto)"
OF_THE_CLOCK = ("seconds", "per_second", "time", "tokens_per")


def test_layers_stay_gathered_where_there_is_room(tmp_path: Path) -> None:
    lines: dict[str, list[dict[str, Any]]] = {}
    for name, said, stays in (("again", "true", False), ("room", "null", True)):
        in_ranks(worker, (2, str(tmp_path / f"store-{name}"), str(tmp_path), name, said), 2)
        assert (STAY in (tmp_path / f"{name}-0.out").read_text()) == stays
        for rank in range(2):
            whole = json.loads((tmp_path / f"{name}-{rank}.json").read_text())
            assert whole and set(whole) == {stays}
        assert f"reshard_after_forward: {said}" in (tmp_path / name / "config.yaml").read_text()
        lines[name] = [
            {key: value for key, value in json.loads(line).items() if not any(x in key for x in OF_THE_CLOCK)}
            for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        ]
    assert lines["again"] and lines["again"] == lines["room"]
