"""Parts of preference data that share no dialogue."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path

import pytest

from common.errors import DataError
from tools import dialogue_parts


def row(opening: str, later: str) -> str:
    asked = f"\n\nHuman: {opening}{later}"
    return json.dumps({"chosen": f"{asked}\n\nAssistant: Yes.", "rejected": f"{asked}\n\nAssistant: No."})


def test_continuations_of_a_dialogue_are_in_one_part_and_no_row_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, folder = tmp_path / "pairs.jsonl.gz", tmp_path / "parts"
    later = "\n\nAssistant: What?\n\nHuman: That."
    rows = [row(f"Question {i % 300}?", later * (i // 300)) for i in range(900)]
    with gzip.open(file, "wt", encoding="utf-8") as out:
        out.write("\n".join(rows) + "\n")
    monkeypatch.setattr(sys, "argv", ["dialogue_parts", str(file), str(folder)])
    dialogue_parts.main()
    written = {part.stem: part.read_text().splitlines() for part in folder.iterdir()}
    assert sorted(line for lines in written.values() for line in lines) == sorted(rows)
    openings = [{json.loads(line)["chosen"].split("?")[0] for line in lines} for lines in written.values()]
    assert sum(map(len, openings)) == len(set.union(*openings)) == 300
    for name, share in dialogue_parts.SHARES.items():
        assert abs(len(written[name]) / 900 - share) < 0.1


@pytest.mark.parametrize("text", [b'{"prompt": "a"}', b"[1]", b"chosen", b'{"chosen": 3}', b"\xb4\xff"])
def test_a_row_of_another_form_is_refused_by_its_number(text: bytes, tmp_path: Path) -> None:
    (tmp_path / "pairs.jsonl").write_bytes(row("Question?", "").encode() + b"\n" + text + b"\n")
    with pytest.raises(DataError, match="row 2: "):
        dialogue_parts.cut(tmp_path / "pairs.jsonl", tmp_path / "parts")
    assert not (tmp_path / "parts").exists()
