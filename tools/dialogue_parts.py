"""Cut dialogues of Anthropic HH into parts that share no opening, by dialogue and not by row:

    python -m tools.dialogue_parts harmless.jsonl.gz parts      # parts/{reward,policy,test}.jsonl

A reward model learns from the first part, a policy from the second, and both are tested on the third. Rows
that open with the same human turn are continuations of one dialogue, and come into one part, which a hash of
that turn chooses.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from pathlib import Path

from common.errors import DataError
from common.files import write_whole
from common.options import options_of
from config.cli import guarded
from data.rows import Dropped, read_rows

SHARES = {"reward": 0.5, "policy": 0.3, "test": 0.2}


def part_of(opening: str) -> str:
    """Return the part of the dialogue whose first human turn is ``opening``."""
    place, end = int(hashlib.sha256(opening.encode()).hexdigest(), 16) / 2**256, 0.0
    for name, share in SHARES.items():
        end += share
        if place < end:
            return name
    return name


def cut(file: Path, folder: Path) -> None:
    """Write the parts of ``file`` into ``folder``. Raises ConfigError for what is no file of rows, DataError
    for a row that is not HH's, and OSError."""
    parts: dict[str, list[str]] = defaultdict(list)
    for row in read_rows(file, "file"):
        if isinstance(row, Dropped):
            raise DataError(f"{file}, row {row.row}: {row.reason}")
        chosen = row.values.get("chosen")
        if not isinstance(chosen, str):
            raise DataError(f"{file}, row {row.number}: has no text `chosen`, which the rows of HH have")
        parts[part_of(chosen.partition("\n\nAssistant:")[0])].append(json.dumps(dict(row.values)) + "\n")
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in parts.items():
        write_whole(folder / f"{name}.jsonl", "".join(rows))
        print(f"{folder / name}.jsonl: {len(rows)} rows")


def main() -> None:
    parser = options_of("python -m tools.dialogue_parts", __doc__)
    parser.add_argument("file", type=Path, help="a file of HH")
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    guarded(lambda: cut(args.file, args.folder))


if __name__ == "__main__":
    main()
