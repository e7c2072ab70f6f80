"""The files that a round leaves on disk. They are ``rounds/003/samples.jsonl``, ``scores.jsonl``,
``groups.jsonl`` and ``round.json``; with ``rounds.compress`` the first three end in ``.jsonl.gz``.

Each file is written whole and then renamed. Before the rename, ``round.json`` records what the file was made
from, how, and its checksum. So a stage is done exactly if its file is the one that
``round.json`` records for the current inputs, and a round that was killed continues with the first stage that
is not done. ``round.json`` also says of which run and round it is, so one of another run, or of two that were
swapped, is refused. ``groups.jsonl`` is an ordinary groups file: ``data=local data.path=…`` trains on it.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import itertools
import json
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, BinaryIO

from common.errors import DataError
from common.files import read_json, read_sealed, sealed, whole_file, write_whole
from common.secrets import scrub
from data.groups import from_dict, to_dict
from data.types import Group
from rollouts.rounds import SampledPrompt

Facts = dict[str, Any]
Line = dict[str, Any]

LEVEL = 3
"""Compression level. Files are 12 % larger than at level 9, in 0.12 of the CPU
time."""


class RoundFolder:
    """The files of one round. One process writes them."""

    def __init__(self, path: Path, compress: bool = False, run: str | None = None) -> None:
        """``compress``: whether new files are compressed. Both kinds can be read. ``run``: the run's id; with
        None a round of any run is read."""
        self.path, self.compress = path, compress
        self._origin = {} if run is None else {"run": run, "round": int(path.name)}

    @property
    def record(self) -> Facts:
        """The contents of ``round.json`` so far; {} before the round begins. Raises DataError if the file is
        damaged, or of another run or round."""
        path = self.path / "round.json"
        if not path.exists():
            return {}
        try:
            facts = read_sealed(path)
        except (OSError, ValueError) as error:
            raise self.not_as_written(path, error) from error
        if facts | self._origin != facts:
            why = f"it is of round {facts.get('round')} of run {facts.get('run')}"
            raise self.not_as_written(path, why)
        return facts

    def note(self, facts: Facts) -> None:
        """Add ``facts`` to ``round.json``."""
        write_whole(self.path / "round.json", sealed(self.record | facts | self._origin))

    @property
    def seal(self) -> str:
        """The checksum of ``round.json``."""
        return str(read_json(self.path / "round.json")["sha256"])

    def check(self, seal: str | None) -> None:
        """Raise DataError unless the round and all its files are as they were written. ``seal``: that of the
        finished round; None: it was not finished."""
        stages = self.record.get("stages", {})
        if "groups" not in stages or seal not in (None, self.seal):
            raise self.not_as_written(self.path / "round.json", "it is gone, or not the checkpoint's")
        for stage in stages:
            if not self.done(stage):
                raise self.not_as_written(self.file(stage))

    @property
    def weights(self) -> Path:
        """Folder of the weights that the round is sampled from, if they are on disk."""
        return self.path / "weights"

    def file(self, stage: str) -> Path:
        """Return the path of the stage's file as ``round.json`` records it, else as it would be written
        now."""
        entry = self._promise(stage)
        if entry is None:
            return self._named(stage, self.compress)
        return self.path / entry["file"]

    def _named(self, stage: str, compress: bool) -> Path:
        return self.path / f"{stage}.jsonl{'.gz' if compress else ''}"

    def checksum(self, stage: str) -> str:
        """Return the stage's checksum, which the files made from this stage record as their input."""
        return str(self.record["stages"][stage]["sha256"])

    def _promise(self, stage: str, inputs: Facts | None = None) -> Facts | None:
        """Return the record of the stage's file in ``round.json``; None if there is none, or if it is for
        other ``inputs``."""
        entry: Facts | None = self.record.get("stages", {}).get(stage)
        if entry is None or (
            inputs is not None and scrub(entry["inputs"]) != json.loads(json.dumps(scrub(inputs)))
        ):
            return None
        return entry

    def done(self, stage: str, inputs: Facts | None = None) -> bool:
        """Return whether the stage's file is the recorded one, made from ``inputs`` (None: from any
        inputs)."""
        entry, path = self._promise(stage, inputs), self.file(stage)
        if entry is None or not path.is_file():
            return False
        with path.open("rb") as stream:
            return bool(entry["sha256"] == hashlib.file_digest(stream, "sha256").hexdigest())

    def write(self, stage: str, lines: Iterable[Line | str], inputs: Facts, facts: Facts) -> None:
        """Write the stage's file, of objects or of their JSON, and record its inputs (settings included) and
        ``facts`` (counts, seconds). Raises OSError."""
        path = self._named(stage, self.compress)
        with whole_file(path) as stream:
            written = _Summed(stream)
            _write_lines(lines, written, self.compress)
            entry = {"inputs": scrub(inputs), **facts, "file": path.name}
            promised = entry | {"sha256": written.digest.hexdigest()}
            self.note({"stages": self.record.get("stages", {}) | {stage: promised}})
        self._named(stage, not self.compress).unlink(missing_ok=True)

    def lines(self, stage: str, inputs: Facts | None = None) -> list[Line] | None:
        """Return the lines of a stage that is done, made from ``inputs`` (None: from any inputs); None if it
        is not done."""
        return self.first(stage, None) if self.done(stage, inputs) else None

    def read(self, stage: str) -> list[Line]:
        """Return the lines of a stage that is done. Raises DataError if it is not."""
        lines = self.lines(stage)
        if lines is None:
            raise self.not_as_written(self.file(stage))
        return lines

    def first(self, stage: str, count: int | None) -> list[Line]:
        """Return at most ``count`` lines of a stage that is done (None: all)."""
        path = self.file(stage)
        with path.open("rb") as stream:
            lines = gzip.GzipFile(fileobj=stream) if path.suffix == ".gz" else stream
            return [json.loads(line) for line in itertools.islice(lines, count)]

    def groups(self) -> list[Group]:
        """Return the groups that are trained on. Raises DataError."""
        return [from_dict(line) for line in self.read("groups")]

    def not_as_written(self, path: Path, why: object = "") -> DataError:
        """Return the error for a missing or damaged file of the round, or for a missing or damaged round."""
        return DataError(
            f"{path} is not as it was written{f' ({why})' if why else ''}; put it back from a copy, or "
            f"delete {self.path} and resume from a checkpoint before it, or start the run afresh with "
            "overwrite=true"
        )


class _Summed(io.RawIOBase):
    """Writes to ``stream``, and computes the SHA-256 digest of what is written."""

    def __init__(self, stream: BinaryIO) -> None:
        self.stream, self.digest = stream, hashlib.sha256()

    def writable(self) -> bool:
        return True

    def write(self, content: Any) -> int:
        self.digest.update(content)
        return self.stream.write(content)


def _write_lines(lines: Iterable[Line | str], stream: _Summed, compress: bool) -> None:
    """Write the lines. The same lines give the same bytes: a compressed file contains neither its name nor
    the time."""
    with gzip.GzipFile("", "wb", LEVEL, stream, mtime=0) if compress else nullcontext(stream) as into:
        for line in lines:
            text = line if isinstance(line, str) else json.dumps(line, ensure_ascii=False)
            into.write((text + "\n").encode())


def sampled_line(sampled: SampledPrompt) -> Line:
    """Return a line of a samples file, which is a line of a groups file without rewards."""
    blank = Group(sampled.prompt, sampled.completions, (0.0,) * len(sampled.completions))
    return {key: value for key, value in to_dict(blank).items() if key != "rewards"}


def sampled_of(line: Line) -> SampledPrompt:
    """Return the prompt and samples of a line of samples. Raises RowError."""
    group = from_dict(line | {"rewards": [0.0] * len(line["completions"])})
    return SampledPrompt(group.prompt, group.completions)
