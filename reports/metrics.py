"""A run's files of numbers, ``metrics.jsonl`` and ``diagnostics.jsonl``, with one JSON object that has a step
on each line.

A checkpoint has a copy of both files, and of answers.jsonl, as they were when it was written, and a resumed
run starts from that copy. So each step appears in them once, whatever happened to the files since.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Container, Iterator
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from common.errors import DataError
from common.files import on_disk, open_own, regular_file, whole_file, write_whole
from reports.answers import FILE as ANSWERS

Record = dict[str, Any]
METRICS, DIAGNOSTICS = "metrics.jsonl", "diagnostics.jsonl"
FILES = (METRICS, DIAGNOSTICS)


def plain(value: Any) -> Any:
    """Return ``value`` as JSON can represent it: numpy numbers become Python's, and a float that is not
    finite becomes None (null)."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, bool | str) or value is None:
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value) if math.isfinite(value) else None
    return value


def numbers(tree: Any, without: Container[str] = (), prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield (dotted key, number) of nested values, of which lists and the parts ``without`` are left out."""
    if isinstance(tree, dict):
        for key, item in tree.items():
            if key not in without:
                yield from numbers(item, without, f"{prefix}.{key}".lstrip("."))
    elif isinstance(tree, int | float) and not isinstance(tree, bool):
        yield prefix, tree


def read_metrics(path: Path) -> list[Record]:
    """Return the lines of a metrics.jsonl; [] if there is no file. A half-written last line, left by a kill,
    is dropped.

    Raises DataError if another line is no JSON object with a step.
    """
    records: list[Record] = []
    whole, _, _ = _content(path).rpartition(b"\n")  # a half-written last line alone lacks its line end
    for number, line in enumerate(whole.split(b"\n") if whole else [], start=1):
        try:
            record: Record = json.loads(line)
            records.append(record | {"step": int(record["step"])})
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise DataError(
                f"{path}, line {number} is not a line of metrics ({error}); repair the file or remove it"
            ) from error
    return records


def _content(path: Path) -> bytes:
    return regular_file(path).read_bytes() if path.exists() else b""


class LineFile:
    """A file of records that one process appends to; each line goes to disk at once.

    If there is no room for a line, it waits in memory and is written before the next one. The file always
    ends with a whole line.
    """

    def __init__(self, path: Path, fresh: bool) -> None:
        """``fresh``: discard the lines that the file has."""
        self.path = path
        if fresh:
            write_whole(path, "")
        self._waiting: list[bytes] = []
        self._full = False
        descriptor = open_own(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._stream = os.fdopen(descriptor, "ab", buffering=0)

    def append(self, record: Record) -> None:
        """Append one line. ``record`` is plain data; its step is above that of the line before."""
        self._waiting.append(json.dumps(record, allow_nan=False).encode() + b"\n")
        try:
            self._write()
        except OSError as error:
            if not self._full:
                message = f"{error} {on_disk(self.path)}; its lines wait in memory until they can be written"
                print(f"{self.path}: {message}", flush=True)
            self._full = True

    def _write(self) -> None:
        """Write the waiting lines. Raises OSError and then leaves none of them in the file."""
        data, size = memoryview(b"".join(self._waiting)), os.fstat(self._stream.fileno()).st_size
        rest = data
        try:
            while rest:
                rest = rest[self._stream.write(rest) or 0 :]
        except OSError:
            os.ftruncate(self._stream.fileno(), size)
            raise
        self._waiting.clear()
        self._full = False

    def settle(self) -> bytes:
        """Write the waiting lines and return the file's content. Raises OSError."""
        self._write()
        return _content(self.path)

    def copy_to(self, folder: Path) -> None:
        """Copy the file with all its lines into a checkpoint's ``folder``. Raises OSError."""
        (folder / self.path.name).write_bytes(self.settle())

    def close(self) -> None:
        self._stream.close()


def _replace(path: Path, content: bytes) -> None:
    with whole_file(path) as stream:
        stream.write(content)


def restore(run_dir: Path, checkpoint: Path, step: int) -> None:
    """Restore a run's files as they were when ``checkpoint``, the one before ``step``, was written. A file
    that is not as the run left it is reported, and kept beside the restored one as ``<name>.damaged``."""
    for name in FILES:
        current, kept = _content(run_dir / name), b"" if step == 0 else _content(checkpoint / name)
        _put_back(run_dir / name, current, kept, checkpoint)
    if (checkpoint / ANSWERS).exists():
        _put_back(run_dir / ANSWERS, _content(run_dir / ANSWERS), _content(checkpoint / ANSWERS), checkpoint)


def _put_back(path: Path, current: bytes, kept: bytes, checkpoint: Path) -> None:
    """Make the file hold ``kept``. Where ``current`` does not begin with it, that is printed, and ``current``
    is kept beside it."""
    if not current.startswith(kept):
        print(f"{path} is not as the run left it; it is put back from {checkpoint}", flush=True)
        if current:
            _replace(path.with_name(f"{path.name}.damaged"), current)
    if path.exists() or kept:
        _replace(path, kept)
