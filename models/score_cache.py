"""Log-probabilities on disk, so that every later run that starts from the same weights reads them instead of
scoring again, and their table by the row's key, whose values stay in the files."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from uuid import uuid4

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from common.errors import StoppedError
from common.files import on_disk
from data.arrow_file import ArrowFile, DamagedError, lists, split, write

SCHEMA = pa.schema({"key": pa.binary(), "values": pa.list_(pa.float32())})
"""The row's key; the log-probabilities of its tokens, nats"""
_ROWS = 32
"""Rows of a record batch; a score is read with its whole batch."""
_HELD = 64
"""Record batches that are kept decoded."""
LAYOUT = "arrow: key, values"
"""Part of the digest that names a folder: other versions lay out their files differently."""


@dataclass(frozen=True)
class Shard:
    """A file of scores."""

    file: ArrowFile
    keys: np.ndarray
    """[rows] byte strings"""


Shards = dict[str, Shard]
"""File name -> its scores"""


class KeyIndex:
    """Position of each of many keys; for a key that occurs several times, the last position."""

    def __init__(self, keys: np.ndarray) -> None:
        """``keys``: [n] byte strings (numpy's S)"""
        order = np.argsort(keys, kind="stable")
        ordered = keys[order]
        last = np.append(ordered[1:] != ordered[:-1], True)[: len(order)]
        self.keys, self._places = ordered[last], order[last]

    def __len__(self) -> int:
        return len(self.keys)

    def __iter__(self) -> Iterator[str]:
        """Yield the keys in order of their positions."""
        return (self.keys[i].decode() for i in np.argsort(self._places))

    def __contains__(self, key: str) -> bool:
        wanted = key.encode()
        at = int(np.searchsorted(self.keys, wanted))
        return at < len(self.keys) and bool(self.keys[at] == wanted)

    def place(self, key: str) -> int:
        """Return the position of ``key``. Raises KeyError."""
        if key not in self:
            raise KeyError(key)
        return int(self._places[np.searchsorted(self.keys, key.encode())])


class ScoreTable(Mapping[str, Tensor]):
    """Key -> [C] log-probabilities, nats, float32, CPU. For a key in several shards the last one counts."""

    def __init__(self, shards: Sequence[Shard] = ()) -> None:
        self._index = KeyIndex(np.concatenate([np.zeros(0, "S1"), *(shard.keys for shard in shards)]))
        files = [(shard.file, at) for shard in shards for at in range(len(shard.file.counts))]
        counts = np.concatenate([np.zeros(0, np.int64), *(shard.file.counts for shard in shards)])
        self._ends = np.cumsum(counts)
        self._starts = self._ends - counts

        @lru_cache(_HELD)
        def values(batch: int) -> tuple[np.ndarray, np.ndarray]:
            file, at = files[batch]
            return split(file[at].column("values"))

        self._values = values

    def __len__(self) -> int:
        return len(self._index)

    def __iter__(self) -> Iterator[str]:
        return iter(self._index)

    def __getitem__(self, key: str) -> Tensor:
        """Raises KeyError, and DamagedError if the key's file has changed since it was opened."""
        place = self._index.place(key)
        batch = int(np.searchsorted(self._ends, place, side="right"))
        bounds, values = self._values(batch)
        row = place - int(self._starts[batch])
        return torch.tensor(values[bounds[row] : bounds[row + 1]])

    def missing(self, keys: np.ndarray) -> np.ndarray:
        """Return [n] bool, which of ``keys`` ([n] byte strings) have no score."""
        return ~np.isin(keys, self._index.keys)


def _batches(scores: Mapping[str, Tensor]) -> Iterator[pa.RecordBatch]:
    rows = iter(scores.items())
    while part := list(itertools.islice(rows, _ROWS)):
        keys = pa.array([key.encode() for key, _ in part], pa.binary())
        values = lists([values.float().cpu().numpy() for _, values in part], pa.float32())
        yield pa.RecordBatch.from_arrays([keys, values], schema=SCHEMA)


class ScoreCache:
    """Shards of scores, written as they are computed to ``<root>/scores/<digest of parts>/*.arrow``
    (``data.arrow_file``). Any number of processes may use a folder at once."""

    def __init__(self, root: Path, parts: dict[str, str], rank: int) -> None:
        """``parts``: everything that a score depends on."""
        self.parts, self.rank = parts | {"layout": LAYOUT}, rank
        self.key = hashlib.sha256(json.dumps(self.parts, sort_keys=True).encode()).hexdigest()[:24]
        self.folder = root / "scores" / self.key

    def shards(self) -> Shards:
        """Return every shard written so far, of any rank. A shard that is not as it was written is reported
        and removed; its rows are scored again."""
        shards: Shards = {}
        for path in sorted(self.folder.glob("*.arrow")):
            if path.name.startswith("."):  # one that is being written
                continue
            try:
                shards[path.name] = self._read(path)
            except FileNotFoundError:  # removed by another rank
                continue
            except (OSError, ValueError, DamagedError) as error:
                print(f"{path}: removed, its rows are scored again: {error}", flush=True)
                with contextlib.suppress(OSError):  # a folder of that name
                    path.unlink()
        return shards

    def _read(self, path: Path) -> Shard:
        file = ArrowFile(path, SCHEMA, keep_open=False)
        if file.about != self.key:
            raise ValueError("it is of other weights")
        keys = [np.array(file[at].column("key").to_pylist(), "S") for at in range(len(file.counts))]
        return Shard(file, np.concatenate([np.zeros(0, "S1"), *keys]))

    def write(self, scores: dict[str, Tensor]) -> None:
        """Write one more shard under a temporary name, then rename it. Raises StoppedError where it cannot be
        written."""
        name = f"{self.rank:04d}-{uuid4().hex}.arrow"  # a process id may occur on another node too
        part = self.folder / f".{name}.part"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if not (about := self.folder / "about.json").exists():
                part.write_text(json.dumps(self.parts, indent=2, sort_keys=True))
                os.replace(part, about)  # if several write at once, one file stays: they are equal
            with part.open("wb") as file:
                write(file, SCHEMA, _batches(scores), lambda: self.key)
            os.replace(part, self.folder / name)
        except OSError as error:
            with contextlib.suppress(OSError):  # cache_dir, or a part of it, is no folder
                part.unlink()
            message = f"{self.folder}: scores cannot be written ({error}) {on_disk(self.folder)}; "
            message += "make room, or name another cache_dir"
            if self.rank:
                print(f"rank {self.rank}: {message}", flush=True)  # programs print only rank 0's errors
            raise StoppedError(message) from error
