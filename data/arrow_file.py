"""Arrow files (pyarrow's IPC stream) whose record batches are read one at a time, each with a checksum.

After the stream's end come the batches' sizes, numbers of rows and checksums, what the file is ``about``, and
a checksum of these. A batch is read by a plain read and compared with its checksum each time: a file that is
cut or rewritten while a run reads it ends the run with a message. A mapped file would end it with SIGBUS, or
silently give other numbers.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa

from common.errors import StoppedError
from common.files import regular_file
from config.machine import speaks

_END = b"\xff\xff\xff\xff\x00\x00\x00\x00"
"""The end of an IPC stream."""
_WIDTH = 16
"""Bytes of a checksum"""
_LAST = _WIDTH + 8
"""Bytes after the description: its checksum and its length"""


class DamagedError(StoppedError):
    """A file is not what was written."""


def write(
    file: BinaryIO, schema: pa.Schema, batches: Iterable[pa.RecordBatch], about: Callable[[], Any]
) -> None:
    """Write ``batches`` as they arrive, then the result of ``about``, which is called after the last. The
    same batches give the same bytes. Raises OSError."""
    sizes: list[int] = []
    counts: list[int] = []
    digests: list[str] = []

    def put(content: pa.Buffer) -> None:
        file.write(content)
        sizes.append(len(content))
        digests.append(_digest(content).hex())

    put(schema.serialize())
    for batch in batches:
        put(batch.serialize())
        counts.append(batch.num_rows)
    described = {"sizes": sizes, "counts": counts, "digests": "".join(digests), "about": about()}
    tail = _END + json.dumps(described).encode()
    file.write(tail + _digest(tail) + len(tail).to_bytes(8, "little"))


class ArrowFile:
    """The record batches of a file, which take no memory of the process."""

    def __init__(self, path: Path, schema: pa.Schema, keep_open: bool = True) -> None:
        """``keep_open``: the file is opened once, and may lose its name. Otherwise it is opened at each read,
        since a process may have only so many open files. Raises OSError, or DamagedError for what is no such
        file, as far as its end says. Batches are compared with their checksums when they are read."""
        self.path, self._schema = regular_file(path).absolute(), schema
        self._file = path.open("rb", buffering=0) if keep_open else None
        size = path.stat().st_size
        last = self._bytes(max(size - _LAST, 0), _LAST)
        length = int.from_bytes(last[_WIDTH:], "little")
        tail = self._bytes(size - _LAST - length, length) if length <= size - _LAST else b""
        if _digest(tail) != last[:_WIDTH] or not tail.startswith(_END):
            raise self._damaged()
        described = json.loads(tail[len(_END) :])
        ends = np.cumsum(np.array(described["sizes"], np.int64))
        if ends[-1] + length + _LAST != size:
            raise self._damaged()
        self._starts, self._ends = ends[:-1], ends[1:]
        self._digests = bytes.fromhex(described["digests"])
        self.counts = np.array(described["counts"], np.int64)
        self.about: Any = described["about"]
        if _digest(self._bytes(0, int(ends[0]))) != self._digests[:_WIDTH]:
            raise self._damaged()

    def __getitem__(self, at: int) -> pa.RecordBatch:
        """Read a batch. Raises DamagedError if it is not what was written."""
        start, end, place = int(self._starts[at]), int(self._ends[at]), _WIDTH * (at + 1)
        content = self._bytes(start, end - start)
        if _digest(content) != self._digests[place : place + _WIDTH]:
            raise self._damaged()
        return pa.ipc.read_record_batch(pa.py_buffer(content), self._schema)

    def _bytes(self, start: int, size: int) -> bytes:
        # pread needs no file position, which threads and forked processes would share
        try:
            if self._file is not None:
                return os.pread(self._file.fileno(), size, start)
            with self.path.open("rb", buffering=0) as file:
                return os.pread(file.fileno(), size, start)
        except OSError as error:
            raise self._damaged(f" ({error})") from error

    def _damaged(self, why: str = "") -> DamagedError:
        message = (
            f"{self.path}: is not what was written there{why}; nobody may change it while a run reads it. "
            "Start the same command again (a run with resume=true): what is damaged is made again"
        )
        if not speaks(os.environ):
            print(f"rank {os.environ['RANK']}: {message}", flush=True)  # programs print only rank 0's errors
        return DamagedError(message)


def _digest(content: bytes | pa.Buffer) -> bytes:
    return hashlib.sha256(content).digest()[:_WIDTH]


def lists(arrays: Sequence[np.ndarray | None], kind: pa.DataType) -> pa.ListArray:
    """Return these arrays as an Arrow array of lists; None stands for a missing one."""
    there = [one for one in arrays if one is not None]
    values = np.concatenate([np.zeros(0, kind.to_pandas_dtype()), *there], dtype=kind.to_pandas_dtype())
    offsets = np.cumsum([0, *(0 if one is None else len(one) for one in arrays)], dtype=np.int32)
    missing = pa.array([one is None for one in arrays], pa.bool_()) if len(there) < len(arrays) else None
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values), mask=missing)


def split(column: pa.ListArray) -> tuple[np.ndarray, np.ndarray]:
    """Return where each list of an Arrow array begins, [n + 1], and the values of all, without a copy."""
    _, offsets, _, values = column.buffers()
    kind = column.type.value_type.to_pandas_dtype()
    return np.frombuffer(offsets, np.int32, len(column) + 1), np.frombuffer(values or b"", kind)
