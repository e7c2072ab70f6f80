"""Tokenised rows in one file, whose ids are read where they lie when a row is asked for.

The file is of the safetensors format. ``tokens`` has the ids of all rows one behind the other, a prompt once
where neighbours share it. ``prompt_starts``, ``prompt_sizes``, ``starts`` and ``sizes`` say where those of a
row are. A row that cannot be trained on has -1 - r for its size, where r is the number of its reason.
``about`` is JSON. The header is as long in every file, because what it says is known last.
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
"""Tokenised rows in their order, or for one of them the reason why there is none."""

_INDEX = {"prompt_starts": "q", "prompt_sizes": "i", "starts": "q", "sizes": "i"}
_NAMES = {"i": ("I32", 4), "q": ("I64", 8), "B": ("U8", 1)}
_HEADER = 1024
_NO_DIGEST = "0" * 32
_AT_ONCE = 1 << 22


class TokenRows(Sequence[Row | str]):
    """The rows of a file: their ids take no memory of the process."""

    def __init__(self, arrays: dict[str, np.ndarray], reasons: Sequence[str]) -> None:
        """``arrays``: those of the file, [tokens] int32 and [rows]."""
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
    """Write ``rows`` as they come, and what ``about`` says once they have all come. The same rows give the
    same bytes. Raises OSError."""
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
        if tokens % 2:  # what follows begins at a multiple of eight bytes
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
    """The ids to write, while ``index`` and ``reasons`` are filled."""
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
    """Wide numbers first, so that each begins at a multiple of its own width."""
    return dict(sorted(columns.items(), key=lambda item: -item[1].itemsize))


def _header(tokens: int, columns: dict[str, array[int]]) -> bytes:
    """The first bytes of the file, without its digest."""
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
    """The rows of a file that ``write_rows`` wrote, and what it says about them. Raises OSError, ValueError
    or SafetensorError for a file that is not as it was written."""
    with safe_open(path, framework="pt") as file:  # maps the file; framework="numpy" would copy it
        known = (file.metadata() or {}).get("digest", "")
        names = set(file.keys())
        if names != {"tokens", "about", *_INDEX} or known != _digest(path, known):
            raise ValueError("not what was written under this name")
        arrays = {name: file.get_tensor(name).numpy() for name in names}
    about = json.loads(arrays["about"].tobytes())
    return TokenRows(arrays, about["reasons"]), about


def _digest(path: Path, known: str) -> str:
    """The digest of the file, read and not mapped: a page that is mapped counts as memory of the process."""
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        header = file.read(_HEADER).replace(known.encode(), _NO_DIGEST.encode())
        while content := file.read(_AT_ONCE):
            digest.update(content)
    digest.update(header)
    return digest.hexdigest()
