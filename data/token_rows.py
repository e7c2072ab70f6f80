"""A file of tokenised rows whose token ids are read from the file only when a row is needed.

The file has the safetensors format. ``tokens`` holds the ids of all rows one after the other; neighbouring
rows with the same prompt share one copy of its ids. ``prompt_starts``, ``prompt_sizes``, ``starts`` and
``sizes`` give the place of each row's ids. The size of a row that cannot be trained on is -1 - r, where r is
the number of the reason. ``about`` is JSON. The header has the same length in every file, because its content
is known last.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np
from safetensors import safe_open

from data.types import Sequence as Row

Rendered = Sequence[Row | str]
"""Tokenised rows in their order; a row that cannot be trained on is replaced by the reason."""

_INDEX = {"prompt_starts": "q", "prompt_sizes": "i", "starts": "q", "sizes": "i"}
_NAMES = {"i": ("I32", 4), "q": ("I64", 8), "B": ("U8", 1)}
_HEADER = 1024
_NO_DIGEST = "0" * 32
_AT_ONCE = 1 << 22


class TokenRows(Sequence[Row | str]):
    """The rows of a file. Their ids take no memory of the process."""

    def __init__(self, arrays: dict[str, np.ndarray], reasons: Sequence[str]) -> None:
        """``arrays`` are the arrays of the file: ``tokens`` is [tokens] int32, the others are [rows]."""
        self.tokens = arrays["tokens"]
        self.prompt_starts, self.prompt_sizes = arrays["prompt_starts"], arrays["prompt_sizes"]
        self.starts, self.sizes = arrays["starts"], arrays["sizes"]
        self.reasons = tuple(reasons)

    def __len__(self) -> int:
        return len(self.sizes)

    @overload
    def __getitem__(self, at: int) -> Row | str: ...

    @overload
    def __getitem__(self, at: slice) -> Rendered: ...

    def __getitem__(self, at: int | slice) -> Row | str | Rendered:
        if isinstance(at, slice):
            return [self[i] for i in range(*at.indices(len(self)))]
        size = int(self.sizes[at])
        if size < 0:
            return self.reasons[-1 - size]
        start, prompt = int(self.starts[at]), int(self.prompt_starts[at])
        ids = self.tokens[prompt : prompt + int(self.prompt_sizes[at])]
        return Row(ids, self.tokens[start : start + size])

    def __iter__(self) -> Iterator[Row | str]:
        return (self[i] for i in range(len(self)))


def write_rows(path: Path, rows: Iterable[Row | str], about: Callable[[], dict[str, Any]]) -> None:
    """Write ``rows`` as they arrive, then the result of ``about``, which is called after the last row. The
    same rows give the same bytes. Raises OSError."""
    index = {name: array(kind) for name, kind in _INDEX.items()}
    reasons: dict[str, int] = {}
    digest = hashlib.blake2b(digest_size=16)
    with path.open("wb") as file:

        def put(content: bytes) -> None:
            digest.update(content)
            file.write(content)

        file.write(b" " * _HEADER)
        tokens = 0
        for ids in _indexed(rows, index, reasons):
            put(np.ascontiguousarray(ids, np.int32).tobytes())
            tokens += len(ids)
        if tokens % 2:  # the next array must begin at a multiple of eight bytes
            put(bytes(4))
            tokens += 1
        said = json.dumps({**about(), "reasons": list(reasons)}).encode()
        columns = {**index, "about": array("B", said)}
        put(b"".join(column.tobytes() for column in _by_width(columns).values()))
        header = _header(tokens, _by_width(columns))
        digest.update(header)
        file.seek(0)
        file.write(header.replace(_NO_DIGEST.encode(), digest.hexdigest().encode()))


def _indexed(
    rows: Iterable[Row | str], index: dict[str, array[int]], reasons: dict[str, int]
) -> Iterator[np.ndarray]:
    """Yield the ids to write, and fill ``index`` and ``reasons`` meanwhile."""
    at = 0
    prompt: np.ndarray | None = None
    prompt_start = 0
    for row in rows:
        if isinstance(row, str):
            places = (0, 0, 0, -1 - reasons.setdefault(row, len(reasons)))
        else:
            if row.prompt_ids is not prompt:
                prompt, prompt_start = row.prompt_ids, at
                yield prompt
                at += len(prompt)
            places = (prompt_start, len(row.prompt_ids), at, len(row.completion_ids))
            yield row.completion_ids
            at += len(row.completion_ids)
        for name, place in zip(_INDEX, places, strict=True):
            index[name].append(place)


def _by_width(columns: dict[str, array[int]]) -> dict[str, array[int]]:
    """Return the columns with wide numbers first, so that each column begins at a multiple of its own
    width."""
    return dict(sorted(columns.items(), key=lambda item: -item[1].itemsize))


def _header(tokens: int, columns: dict[str, array[int]]) -> bytes:
    """Return the first bytes of the file, with a placeholder for the digest."""
    layout: dict[str, Any] = {
        "__metadata__": {"digest": _NO_DIGEST},
        "tokens": {"dtype": "I32", "shape": [tokens], "data_offsets": [0, 4 * tokens]},
    }
    end = 4 * tokens
    for name, column in columns.items():
        dtype, width = _NAMES[column.typecode]
        first, end = end, end + width * len(column)
        layout[name] = {"dtype": dtype, "shape": [len(column)], "data_offsets": [first, end]}
    text = json.dumps(layout).encode().ljust(_HEADER - 8)
    return len(text).to_bytes(8, "little") + text


def read_rows(path: Path) -> tuple[TokenRows, dict[str, Any]]:
    """Return the rows of a file that ``write_rows`` wrote, and the content of ``about``. Raises OSError,
    ValueError or SafetensorError for a file that has changed since it was written."""
    with safe_open(path, framework="pt") as file:  # "pt" maps the file; "numpy" would copy it
        known = (file.metadata() or {}).get("digest", "")
        names = set(file.keys())
        if names != {"tokens", "about", *_INDEX} or known != _digest(path, known):
            raise ValueError("not what was written under this name")
        arrays = {name: file.get_tensor(name).numpy() for name in names}
    about = json.loads(arrays["about"].tobytes())
    return TokenRows(arrays, about["reasons"]), about


def _digest(path: Path, known: str) -> str:
    """Return the digest of the file. The file is read and not mapped, because mapped pages count as memory of
    the process."""
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        header = file.read(_HEADER).replace(known.encode(), _NO_DIGEST.encode())
        while content := file.read(_AT_ONCE):
            digest.update(content)
    digest.update(header)
    return digest.hexdigest()
