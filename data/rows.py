"""Rows as a file holds them, and what became of them: the layer under every source.

``read_rows`` streams .json (one list), .jsonl and .parquet files, the first two also gzipped. A row that cannot be read is yielded
as ``Dropped`` with its place, never skipped in silence.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import pyarrow
import pyarrow.parquet

from common.errors import ConfigError, DataError
from data.types import Group

SUFFIXES = (".json", ".jsonl", ".parquet", ".json.gz", ".jsonl.gz")


@dataclass(frozen=True)
class Row:
    """One record of a file or a hub table, as it stands there."""

    file: str
    number: int
    """From 1: the line of a .jsonl file, else the place in the list or table."""
    values: Mapping[str, Any]


@dataclass(frozen=True)
class Dropped:
    """A row that is not trained on, and why. ``row`` counts from 1; 0 where no one row is to blame."""

    file: str
    row: int
    reason: str


@dataclass
class Loaded:
    """What a source gives: the groups it could make and an account of the rest."""

    groups: list[Group]
    read: int
    """Rows read, good and bad. Several rows may make one group (scored samples) or several groups one conversation tree."""
    dropped: list[Dropped] = field(default_factory=list)
    origin: str = ""
    """Where the groups came from and how the split was made, in words, for the data report."""


def read_rows(path: Path, key: str = "data.path") -> Iterator[Row | Dropped]:
    """Stream the rows of a local file.

    ``key`` is the setting that named the file, for messages. Raises ConfigError when the file is missing or of another kind,
    DataError when it is damaged as a whole.
    """
    if not path.is_file():
        raise ConfigError(key, path, f"no such file (the working directory is {Path.cwd()})")
    kind = "".join(path.suffixes[-2:]) if path.suffix == ".gz" else path.suffix
    if kind not in SUFFIXES:
        raise ConfigError(
            key, path, f"is not a kind of file that can be read; use one of {', '.join(SUFFIXES)}"
        )
    try:
        if kind == ".parquet":
            yield from _read_parquet(path)
            return
        with _open_text(path) as stream:
            yield from (
                _read_json_list(path, stream)
                if kind.startswith(".json.") or kind == ".json"
                else _read_lines(path, stream)
            )
    except (OSError, EOFError, UnicodeDecodeError, pyarrow.ArrowInvalid) as error:
        raise DataError(f"{path}: cannot be read to its end ({error}); make or download it again") from error


def _open_text(path: Path) -> IO[str]:
    return gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8")


def _read_parquet(path: Path) -> Iterator[Row | Dropped]:
    number = 0
    for batch in pyarrow.parquet.ParquetFile(path).iter_batches(batch_size=1000):
        for values in batch.to_pylist():
            number += 1
            yield Row(path.name, number, values)


def _read_json_list(path: Path, stream: IO[str]) -> Iterator[Row | Dropped]:
    try:
        records = json.load(stream)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{path}: is not JSON ({error}); a file with one object a line must be named .jsonl"
        ) from error
    if not isinstance(records, list):
        raise DataError(
            f"{path}: holds a {type(records).__name__}, but a .json file must hold one list of objects"
        )
    for number, values in enumerate(records, 1):
        yield _as_row(path, number, values)


def _read_lines(path: Path, stream: IO[str]) -> Iterator[Row | Dropped]:
    for number, line in enumerate(stream, 1):
        if not line.strip():
            continue
        try:
            yield _as_row(path, number, json.loads(line))
        except json.JSONDecodeError as error:
            yield Dropped(path.name, number, f"not JSON: {error.msg}")


def _as_row(path: Path, number: int, values: Any) -> Row | Dropped:
    if not isinstance(values, dict):
        return Dropped(path.name, number, "not a JSON object")
    return Row(path.name, number, values)
