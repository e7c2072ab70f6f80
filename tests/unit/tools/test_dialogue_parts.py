"""Parts of preference data that share no dialogue."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path

import pytest

from tools import dialogue_parts


def row(opening: str, *turns: str) -> str:
    asked = f"\n\nHuman: {opening}" + "".join(turns)
    return json.dumps({"chosen": f"{asked}\n\nAssistant: Yes.", "rejected": f"{asked}\n\nAssistant: No."}) + "\n"


def test_continuations_of_a_dialogue_are_in_one_part_and_no_row_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "pairs.jsonl.gz"
    rows = [row(f"Question {i % 300}?", "\n\nAssistant: What?\n\nHuman: That." * (i // 300)) for i in range(900)]
    with gzip.open(file, "wt", encoding="utf-8") as out:
        out.writelines(rows)
    monkeypatch.setattr(sys, "argv", ["dialogue_parts", str(file), str(tmp_path / "parts")])
    dialogue_parts.main()
    written = {part.stem: part.read_text().splitlines(keepends=True) for part in (tmp_path / "parts").iterdir()}
    assert sorted(sum(written.values(), [])) == sorted(rows)
    openings = {name: {json.loads(line)["chosen"].split("?")[0] for line in lines} for name, lines in written.items()}
    assert sum(map(len, openings.values())) == len(set.union(*openings.values())) == 300
    for name, share in dialogue_parts.SHARES.items():
        assert abs(len(written[name]) / 900 - share) < 0.1
