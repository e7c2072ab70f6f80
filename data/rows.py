"""Rows as a file holds them, with the reason for each row that cannot be used; the layer under every source.

``read_rows`` streams .json (one list), .jsonl, .csv, .tsv and .parquet files, all but the last also gzipped.
A row that cannot be read is yielded as ``Dropped`` with its place, never skipped silently.

Every text of a ``Row`` is valid (it can be written as UTF-8), every number fits Python, and nesting is
shallow enough for recursion. Later code need not check any of this.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import gzip
import itertools
import json
import os
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import pyarrow
import pyarrow.parquet

from common.errors import ConfigError, DataError, require
from data.json_values import fault_of, no_text, parsed
from data.types import Group

SUFFIXES = (".json", ".jsonl", ".parquet", ".csv", ".tsv", ".json.gz", ".jsonl.gz", ".csv.gz", ".tsv.gz")

_MOST = 1 << 28
"""Characters of a .json list, which is read whole."""
_MARK = "\ufeff"


@dataclass(frozen=True)
class Row:
    """One record of a file or a hub table, unchanged."""

    file: str
    number: int
    """From 1: the line of a .jsonl file, otherwise the position in the list or table."""
    values: Mapping[str, Any]


@dataclass(frozen=True)
class Dropped:
    """A row that is not trained on, and why. ``row`` counts from 1; 0 means that no single row is to
    blame."""

    file: str
    row: int
    reason: str
    intended: bool = False
    """Whether a setting or the format leaves such rows out on purpose. The others could not be read."""


class RowError(Exception):
    """A row that cannot become a group; the message is the reason that the data report shows."""

    def dropped(self, row: Row | None) -> Dropped:
        place = (row.file, row.number) if row else ("", 0)
        return Dropped(*place, str(self), intended=isinstance(self, LeftOutError))


class LeftOutError(RowError):
    """A row that could be read and is left out on purpose, such as a tie; any number of rows may be."""


def reasons(dropped: Mapping[str, int]) -> str:
    """Return why rows were left out (reason -> rows), the most frequent reasons in words."""
    most = sorted(dropped.items(), key=lambda item: -item[1])[:3]
    rest = sum(dropped.values()) - sum(n for _, n in most)
    return ", ".join([*(f"{n} × {why}" for why, n in most), *([f"{rest} × other reasons"] if rest else [])])


@dataclass
class Loaded:
    """Result of a source: the groups that it could make, and an account of the other rows."""

    groups: Sequence[Group]
    read: int
    """Rows read, good and bad. Several rows may make one group (scored samples), and one conversation tree
    may make several groups."""
    dropped: list[Dropped] = field(default_factory=list)
    origin: str = ""
    """Where the groups came from and how the split was made, in words, for the data report."""
    format: str = ""
    """The format that the rows were read as; "" if the source makes groups itself."""
    columns: tuple[str, ...] = ()
    """Columns that the format read."""
    unused: tuple[str, ...] = ()
    """Columns that the format did not read."""
    refusal: ConfigError | None = field(default=None, compare=False)
    """Of prompts without answers: the refusal of a column that may decide, unless a reward gets it."""
    propose: Callable[[Sequence[str]], str] = field(default=lambda names: "", compare=False, repr=False)
    """What to type so that more of these columns are read (``data.columns``); "" where nothing works."""
    read_back: tuple[str, ...] = ()
    """What rendered texts were read back (``data.markup``), in words."""


def read_rows(path: Path, key: str = "data.path") -> Iterator[Row | Dropped]:
    """Stream the rows of a local file, which the setting ``key`` names.

    Raises ConfigError if the file is missing or of another kind, DataError if it is damaged as a whole.
    """
    if not os.path.isfile(path):
        folder = "; of a folder every file is read: give its name" if set("*?[") & set(path.name) else ""
        there = "is a folder, pipe or device" if os.path.exists(path) else "is a link to no file"
        missing = f"no such file (the working directory is {Path.cwd()}){folder}"
        raise ConfigError(key, path, there if os.path.lexists(path) else missing)
    kind = "".join(path.suffixes[-2:]) if path.suffix == ".gz" else path.suffix
    why = f"is not a kind of file that can be read; use one of {', '.join(SUFFIXES)}"
    require(kind in SUFFIXES, key, path, why)
    try:
        if kind == ".parquet":
            yield from _read_parquet(path)
            return
        read = {".json": _read_json_list, ".jsonl": _read_lines, ".csv": _read_csv, ".tsv": _read_csv}
        with _open_text(path, newline="" if kind.startswith((".csv", ".tsv")) else None) as stream:
            yield from read[kind.removesuffix(".gz")](path, stream)
    except (OSError, EOFError, zlib.error, pyarrow.ArrowException) as error:
        raise DataError(f"{path}: cannot be read to its end ({error}); make or download it again") from error


# Tables


def _read_parquet(path: Path) -> Iterator[Row | Dropped]:
    with pyarrow.parquet.ParquetFile(path) as file:
        try:
            about = json.loads((file.schema_arrow.metadata or {}).get(b"huggingface", b"{}"))
            classes = class_names(about.get("info", {}).get("features"))
        except (ValueError, AttributeError) as error:
            why = "what datasets wrote of its columns is damaged; write it again"
            raise DataError(f"{path}: {why}") from error
        yield from table_rows(path.name, file.iter_batches(batch_size=1000), classes)


def class_names(features: Any) -> dict[str, Sequence[str]]:
    """Return the names of the columns that ``features`` (of datasets, or as it writes them) calls classes."""
    names = {
        column: feature.get("names") if isinstance(feature, Mapping) else getattr(feature, "names", None)
        for column, feature in (features or {}).items()
    }
    return {column: listed for column, listed in names.items() if isinstance(listed, list)}


def table_rows(
    name: str,
    parts: Iterable[pyarrow.RecordBatch | pyarrow.Table],
    classes: Mapping[str, Sequence[str]] | None = None,
) -> Iterator[Row | Dropped]:
    """Yield the rows of a table that comes in parts, numbered across all parts. Keys inside a column that are
    null were filled in by the table, and are left out. ``classes``: column -> the names of which it holds
    numbers (``ClassLabel`` of datasets); by the names one sees which class is which. Raises DataError for a
    value that Python cannot hold (a text that is not UTF-8, a date after the year 9999)."""
    number = 0
    for part in parts:
        nested = [field.name for field in part.schema if pyarrow.types.is_nested(field.type)]
        try:
            records = part.to_pylist()
        except (ValueError, OverflowError, pyarrow.ArrowException) as error:
            where = f"one of the rows {number + 1} to {number + part.num_rows}"
            raise DataError(f"{name}: a value of {where} cannot be read ({error}); mend it") from error
        for record in records:
            number += 1
            for column in nested:
                record[column] = _without_nulls(record[column])
            for column, names in (classes or {}).items():
                if isinstance(at := record.get(column), int):
                    record[column] = names[at] if 0 <= at < len(names) else None
            yield Row(name, number, record)


def _without_nulls(value: Any) -> Any:
    """Return a nested value without the keys that are null: a table gives every object the keys of all."""
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


# CSV

_SEPARATORS = ",;\t|"


def _separator(lines: list[str]) -> str:
    """Return the character that separates the cells of the first lines: the one that gives the most columns,
    as many in every row as in the first; a comma where there is one column."""
    scores = {}
    for mark in _SEPARATORS:
        with contextlib.suppress(csv.Error):
            sizes = [len(cells) for cells in csv.reader(lines, delimiter=mark) if cells]
            sizes = sizes[: len(lines) // 2 + 1]
            scores[mark] = (len(set(sizes)) == 1, sizes[0]) if sizes and sizes[0] > 1 else (False, 0)
    return max(_SEPARATORS, key=lambda mark: scores.get(mark, (False, 0)))


def _read_csv(path: Path, stream: IO[str]) -> Iterator[Row | Dropped]:
    """Read separated values (comma, semicolon, tab or |), with the column names in the first line. Every cell
    is a text, and an empty cell is None.

    Raises DataError for a quote that is not closed, because the cell would swallow the rows behind it."""
    csv.field_size_limit(sys.maxsize)
    start = list(itertools.islice(stream, 20))
    lines = csv.reader(itertools.chain(start, stream), strict=True, delimiter=_separator(start))
    begin = 1
    try:
        columns = next(lines, [])
        if len(set(columns)) < len(columns) or "" in columns:
            index = "; pandas leaves its index out with index=False" if columns[0] == "" else ""
            why = f"the first line must name every column, each once; it is {columns}{index}"
            raise DataError(f"{path}: {why}")
        begin = lines.line_num + 1
        for number, cells in enumerate(lines, 2):
            begin = lines.line_num + 1
            if not cells:
                continue
            fault = None if len(cells) == len(columns) else f"{len(cells)} cells, but {len(columns)} columns"
            fault = next(filter(None, map(no_text, cells)), fault)
            values = {name: cell or None for name, cell in zip(columns, cells, strict=False)}
            yield Dropped(path.name, number, fault) if fault else Row(path.name, number, values)
    except csv.Error as error:
        raise DataError(
            f"{path}: line {lines.line_num} is not CSV ({error}), in the row that begins at line {begin}; "
            'a quoted cell ends with a quote before the separator, and a quote in it is written twice, as ""'
        ) from error


# JSON


def _open_text(path: Path, newline: str | None = None) -> IO[str]:
    """Open UTF-8 text with or without a byte-order mark. A byte that is not UTF-8 becomes a lone surrogate
    (PEP 383), so that its row can be named. Raises DataError for UTF-16 and UTF-32."""
    with path.open("rb") as start:
        packed = start.peek(2)[:2] == b"\x1f\x8b"  # by content, whatever its name
        first = gzip.GzipFile(fileobj=start).read(2) if packed else start.read(2)
    if first in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        raise DataError(
            f"{path}: cannot be read, it is not UTF-8 but UTF-16 or UTF-32; "
            "convert it, as in iconv -f UTF-16 -t UTF-8 OLD > NEW"
        )
    how: Any = {"mode": "rt", "encoding": "utf-8-sig", "errors": "surrogateescape", "newline": newline}
    return gzip.open(path, **how) if packed else path.open(**how)


def _read_lines(path: Path, stream: IO[str]) -> Iterator[Row | Dropped]:
    for number, line in enumerate(stream, 1):
        text = line.strip().lstrip(_MARK)  # an appended file brings its byte-order mark
        if not text:
            continue
        try:
            values, fault = parsed(text)
        except json.JSONDecodeError as error:
            values, fault = None, f"not JSON: {error.msg}"
            for start, message in OTHER_KINDS.items() if number == 1 else ():
                if text.startswith(start) and (start not in "[{" or text == start):
                    raise DataError(f"{path}: {message}") from error
            if text.startswith("{'"):
                fault = "not JSON but Python's notation, which json.dumps turns into JSON"
        if number == 1 and isinstance(values, list):
            raise DataError(f"{path}: {OTHER_KINDS['[']}")
        yield _as_row(path, number, values, no_text(text) or fault)


OTHER_KINDS = {
    "version https://git-lfs": "is a pointer of Git LFS, not the data: git lfs pull",
    "<": "is a web page, not the data: download the file itself",
    "[": "is a JSON list, which a name in .json says, or jq -c '.[]' writes one a line",
    "{": "has a JSON object over several lines: jq -c . OLD > NEW writes each on one",
}
"""How a file of lines begins that is of another kind -> what it is, and what to do."""


def _read_json_list(path: Path, stream: IO[str]) -> Iterator[Row | Dropped]:
    text = stream.read(_MOST + 1)
    if len(text) > _MOST:
        unpacked = f"gzip -dc {path} | jq -c '.[]'" if path.suffix == ".gz" else f"jq -c '.[]' {path}"
        raise DataError(
            f"{path}: is a list of more than {_MOST:,} characters, and lists are read whole; convert it to "
            f"one object a line, read as it is needed: {unpacked} > {path.name.partition('.')[0]}.jsonl"
        )
    try:
        values, fault = parsed(text)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{path}: is not JSON ({error.msg}: line {error.lineno} column {error.colno}); a file with one "
            "object a line must be named .jsonl"
        ) from error
    if values is None and fault is not None:
        raise DataError(f"{path}: {fault}; write one object a line, and that row is left out alone")
    if not isinstance(values, list):
        kind = type(values).__name__
        raise DataError(f"{path}: holds a {kind}, but a .json file must hold one list of objects")
    sound = fault is None and text.isascii()
    for number, value in enumerate(values, 1):
        yield _as_row(path, number, value, None if sound else fault_of(value))


def _as_row(path: Path, number: int, values: Any, fault: str | None) -> Row | Dropped:
    if fault is None and not isinstance(values, dict):
        fault = "not a JSON object"
    return Row(path.name, number, values) if fault is None else Dropped(path.name, number, fault)
