"""What a round leaves on disk: ``rounds/003/samples.jsonl``, ``scores.jsonl``, ``groups.jsonl`` and
``round.json``.

Each file is written whole, then renamed; before that, ``round.json`` says of it what it was made from, how,
how many lines, and its checksum. So a stage is done exactly if its file is the one that ``round.json``
promises for the inputs at hand, and a round that was killed goes on with the first stage that is not.
``groups.jsonl`` is an ordinary groups file: ``data=local data.path=…`` trains on it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from common.errors import DataError
from common.files import write_whole
from data.groups import from_dict, to_dict
from data.types import Group
from rollouts.rounds import SampledPrompt

Facts = dict[str, Any]
Line = dict[str, Any]


class RoundFolder:
    """The files of one round. One process writes them."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def record(self) -> Facts:
        """What ``round.json`` says so far; {} before the round."""
        path = self.path / "round.json"
        return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}

    def note(self, facts: Facts) -> None:
        """Add to ``round.json``."""
        write_whole(self.path / "round.json", json.dumps(self.record | facts, indent=2, ensure_ascii=False))

    @property
    def weights(self) -> Path:
        """Where the weights lie that the round is sampled from, until it is."""
        return self.path / "weights"

    def file(self, stage: str) -> Path:
        return self.path / f"{stage}.jsonl"

    def checksum(self, stage: str) -> str:
        """The stage's checksum, by which what is made from it names it."""
        return str(self.record["stages"][stage]["sha256"])

    def done(self, stage: str, inputs: Facts | None = None) -> bool:
        """Whether the stage's file is the one that was promised, made from ``inputs`` (None: from
        whatever)."""
        said, path = self.record.get("stages", {}).get(stage), self.file(stage)
        if (
            said is None
            or not path.exists()
            or (inputs is not None and said["inputs"] != json.loads(json.dumps(inputs)))
        ):
            return False
        return bool(said["sha256"] == _sha256(path.read_bytes()))

    def write(self, stage: str, lines: Iterable[Line], inputs: Facts, facts: Facts) -> None:
        """The stage's file, and what is said of it: what it was made from (settings included), and ``facts``
        (counts, seconds)."""
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        said = {"inputs": inputs, "lines": text.count("\n"), **facts, "sha256": _sha256(text.encode())}
        self.note({"stages": self.record.get("stages", {}) | {stage: said}})
        write_whole(self.file(stage), text)

    def read(self, stage: str) -> list[Line]:
        """The lines of a stage that is done. Raises DataError if it is not."""
        if not self.done(stage):
            raise DataError(
                f"{self.file(stage)} is not as it was written; delete {self.path} and resume from a "
                "checkpoint before it, "
                "or start the run afresh with overwrite=true"
            )
        return [json.loads(line) for line in self.file(stage).read_text(encoding="utf-8").split("\n") if line]

    def groups(self) -> list[Group]:
        """What is trained on. Raises DataError."""
        return [from_dict(line) for line in self.read("groups")]


def sampled_line(sampled: SampledPrompt) -> Line:
    """A line of a samples file: a groups file's, without rewards."""
    blank = Group(sampled.prompt, sampled.completions, (0.0,) * len(sampled.completions))
    return {key: value for key, value in to_dict(blank).items() if key != "rewards"}


def sampled_of(line: Line) -> SampledPrompt:
    """What ``sampled_line`` wrote. Raises RowError."""
    group = from_dict(line | {"rewards": [0.0] * len(line["completions"])})
    return SampledPrompt(group.prompt, group.completions)


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
