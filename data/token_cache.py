"""The tokenised rows of groups in a cache on disk, so that a second start on the same data reads the token ids of
the first.

An entry is one file, ``<cache_dir>/tokens/<key>.arrow`` (``data.arrow_file``), with four bytes per token and a
group's prompt once. The key is a digest of everything that the rows depend on: the words of every row in order,
the renderer's fingerprint (tokenizer, template, lengths), the code that renders and the versions of the libraries
that it calls. So an entry is never out of date, and losses that need the same rows of the same groups (DPO and
KTO) share an entry. Any entry may be deleted.
"""  # noqa: E501

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cached_property, lru_cache
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from uuid import uuid4

import numpy as np
import pyarrow as pa

from common.errors import DataError, StoppedError
from data import arrow_file, chat, templates
from data.arrow_file import ArrowFile, lists, split
from data.chat import Renderer
from data.types import Sequence

Rows = tuple[Sequence, ...]
"""The rows of a group, which have the same prompt."""
_TOKENS = 2_048
"""Tokens from which on a record batch is closed. A group is read with its whole batch."""
_HELD = 64
"""Record batches that are kept decoded."""
_VALUES = {"behavior_logprobs": pa.float32(), "loss_mask": pa.bool_()}
SCHEMA = pa.schema(
    {
        "prompt": pa.list_(pa.int32()),
        "completions": pa.list_(pa.list_(pa.int32())),
        "reason": pa.binary(),  # why the group cannot be trained on; empty if it can
        **{name: pa.list_(pa.list_(kind)) for name, kind in _VALUES.items()},
    }
)


def _batches(groups: Iterable[Rows | str]) -> Iterator[pa.RecordBatch]:
    held: list[Rows | str] = []
    tokens = 0
    for group in groups:
        held.append(group)
        tokens += 1 if isinstance(group, str) else sum(map(len, group))
        if tokens >= _TOKENS:
            yield _batch(held)
            held, tokens = [], 0
    if held:
        yield _batch(held)


def _batch(groups: list[Rows | str]) -> pa.RecordBatch:
    group_rows = [() if isinstance(group, str) else group for group in groups]
    rows = [row for group in group_rows for row in group]
    firsts = pa.array(np.cumsum([0, *map(len, group_rows)], dtype=np.int32))

    def nested(name: str, kind: pa.DataType) -> pa.ListArray:
        return pa.ListArray.from_arrays(firsts, lists([getattr(row, name) for row in rows], kind))

    columns = [
        lists([group[0].prompt_ids if group else None for group in group_rows], pa.int32()),
        nested("completion_ids", pa.int32()),
        pa.array(
            [group.encode(errors="surrogatepass") if isinstance(group, str) else b"" for group in groups]
        ),
        *(nested(name, kind) for name, kind in _VALUES.items()),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


class Block:
    """The groups of a record batch."""

    def __init__(self, batch: pa.RecordBatch) -> None:
        completions = batch.column("completions")
        self.prompt_starts, self._prompts = split(batch.column("prompt"))
        self.starts, self._completions = split(completions.values)
        self.first_rows = np.frombuffer(completions.buffers()[1], np.int32, batch.num_rows + 1)
        """[groups + 1]: the first row of each group"""
        self.batch = batch

    @cached_property
    def values(self) -> dict[str, pa.ListArray]:
        """What is known of the tokens of some rows besides their ids"""
        columns = {name: self.batch.column(name).values for name in _VALUES}
        return {name: column for name, column in columns.items() if column.null_count < len(column)}

    def rows(self, group: int) -> Rows:
        """Return the rows of a group."""
        prompt = self._prompts[self.prompt_starts[group] : self.prompt_starts[group + 1]]
        first, last = self.first_rows[group : group + 2].tolist()
        starts = self.starts[first : last + 1].tolist()
        completions = [self._completions[start:stop] for start, stop in pairwise(starts)]
        return tuple(Sequence(prompt, ids, **self._values_of(first + i)) for i, ids in enumerate(completions))

    def _values_of(self, row: int) -> dict[str, np.ndarray]:
        return {
            name: column[row].values.to_numpy(zero_copy_only=False)
            for name, column in self.values.items()
            if column[row].is_valid
        }


class TokenFile:
    """The tokenised rows of groups in a file, read when they are needed. Only their lengths are held, which
    take five bytes a row and eight a group."""

    def __init__(self, path: Path) -> None:
        """Reads the whole file once. Raises OSError or DamagedError."""
        self.file = ArrowFile(path, SCHEMA)
        self._ends = np.cumsum(self.file.counts)
        self._block = lru_cache(_HELD)(lambda at: Block(self.file[at]))
        self.reasons: dict[int, str] = {}
        """group -> why it cannot be trained on"""
        self.any_values = False
        """whether anything is known of any token besides its id"""
        columns: list[tuple[np.ndarray, ...]] = []
        for at, end in enumerate(self._ends.tolist()):
            block = Block(self.file[at])
            logprobs = block.values.get("behavior_logprobs")
            behavior = (
                np.zeros(len(block.starts) - 1, bool) if logprobs is None else np.array(logprobs.is_valid())
            )
            columns.append((*map(np.diff, (block.first_rows, block.prompt_starts, block.starts)), behavior))
            self.any_values |= bool(block.values)
            reasons = block.batch.column("reason").to_pylist()
            self.reasons |= {
                end - len(reasons) + i: reason.decode(errors="surrogatepass")
                for i, reason in enumerate(reasons)
                if reason
            }
        self.counts, self.prompt_sizes, self.sizes, self.behavior = map(
            np.concatenate, zip(*columns, strict=True)
        )
        """[groups] rows, [groups] prompt tokens, [rows] completion tokens, [rows] whether log mu is known"""

    def place(self, group: int) -> tuple[Block, int]:
        """Return (block, which of its groups) of a group. Raises DamagedError if the file has changed."""
        block = int(np.searchsorted(self._ends, group, side="right"))
        return self._block(block), group - int(self._ends[block - 1]) if block else group


Make = Callable[[], Iterable[Rows | str]]
"""A function that tokenises groups: the rows of each, or why it cannot be trained on"""


class TokenCache:
    """Tokenised groups cached under ``root``/tokens. Any number of processes may use a folder at once: an
    entry is written under a temporary name and then renamed, and two processes that write the same entry
    write the same bytes."""

    def __init__(self, root: Path, write: bool = True, worth: int = 2_000) -> None:
        """With ``write`` False, no file is left behind. The cache is used from ``worth`` rows on; fewer are
        tokenised in about a second and kept in memory."""
        self.folder, self.write, self.worth = root / "tokens", write, worth

    def get(self, renderer: Renderer, words: str, make: Make) -> TokenFile:
        """Return what ``make`` gives for the rows whose words have the digest ``words``, from their entry if
        a sound one exists, and count the renderer's cuts."""
        versions = [version(package) for package in ("tokenizers", "transformers", "jinja2", "pyarrow")]
        files = (__file__, *(str(module.__file__) for module in (arrow_file, chat, templates)))
        parts = renderer.fingerprint, versions, [Path(name).read_bytes() for name in files], words
        key = hashlib.sha256(repr(parts).encode()).hexdigest()[:32]
        path = self.folder / f"{key}.arrow"
        return self._read(path, renderer) or self._new_entry(path, renderer, make)

    def _read(self, path: Path, renderer: Renderer) -> TokenFile | None:
        """Return an entry; None if there is none, or if its content is not what was written under this key.
        The latter is printed."""
        try:
            entry = TokenFile(path)
            if entry.file.about["key"] != path.stem:
                raise ValueError("it is another entry")
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, StoppedError) as error:
            print(f"{path}: damaged or foreign, its rows are tokenised again ({error})", flush=True)
            return None
        renderer.cuts.update(entry.file.about["cuts"])
        return entry

    def _new_entry(self, path: Path, renderer: Renderer, make: Make) -> TokenFile:
        """Return the entry ``path``, made now; without ``write`` a temporary file, whose name is gone. Raises
        DataError if it cannot be written."""
        part = self.folder / f".{path.stem}-{uuid4().hex}.part"  # a process id is not unique across nodes
        try:
            if not self.write:
                part = Path(tempfile.gettempdir()) / part.name
            part.parent.mkdir(parents=True, exist_ok=True)
            _write(part, path.stem, renderer, make)
            return TokenFile(part.replace(path) if self.write else part)
        except OSError as error:
            raise DataError(
                f"{part.parent}: the token ids of the data cannot be written ({error}); make room, or name "
                "another cache_dir (for a dry run TMPDIR)"
            ) from error
        finally:
            with suppress(OSError):
                part.unlink()


def _write(path: Path, key: str, renderer: Renderer, make: Make) -> None:
    before = dict(renderer.cuts)

    def about() -> dict[str, object]:
        return {"key": key, "cuts": {what: n - before.get(what, 0) for what, n in renderer.cuts.items()}}

    with path.open("wb") as file:
        arrow_file.write(file, SCHEMA, _batches(make()), about)
