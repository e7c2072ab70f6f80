"""Groups in order, in memory while they are few, in a file while they are many.

The file has no name and is gone with the process that made it: it lies in the folder for temporary files
(TMPDIR). A group is read from it each time that it is asked for.
"""

from __future__ import annotations

import itertools
import os
import pickle
import tempfile
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import IO, overload

import numpy as np

from common.errors import DataError
from data.types import Group

MOST = 20_000
"""Groups that are kept in memory: of two answers of 200 words each about 50 MB."""
_AT_ONCE = 1 << 20
"""Bytes that are collected before they are written."""

Groups = Sequence[Group]


class FileGroups(Sequence[Group]):
    """Groups in a file: 32 bytes of memory each. What is picked of them lies in the same file."""

    def __init__(self, file: IO[bytes], starts: np.ndarray, sizes: np.ndarray, ids: np.ndarray) -> None:
        """``starts``, ``sizes``: [groups] int64, bytes. ``ids``: [groups] S16, their prompts'."""
        self._file, self._starts, self._sizes, self.prompt_ids = file, starts, sizes, ids

    def __len__(self) -> int:
        return len(self._starts)

    @overload
    def __getitem__(self, at: int) -> Group: ...

    @overload
    def __getitem__(self, at: slice) -> Groups: ...

    def __getitem__(self, at: int | slice) -> Group | Groups:
        if isinstance(at, slice):
            return self.pick(np.arange(len(self))[at])
        size = int(self._sizes[at])
        # pread: threads and forked processes share no place in the file
        found = pickle.loads(os.pread(self._file.fileno(), size, int(self._starts[at])))
        assert isinstance(found, Group)
        return found

    def __iter__(self) -> Iterator[Group]:
        return (self[i] for i in range(len(self)))

    def pick(self, indices: np.ndarray) -> FileGroups:
        """The groups at ``indices`` ([n] int64), in that order."""
        return FileGroups(self._file, self._starts[indices], self._sizes[indices], self.prompt_ids[indices])


def gathered(groups: Iterable[Group], most: int | None = None) -> Groups:
    """All of ``groups``: a list, or from ``most`` (MOST) on a file. Raises DataError where there is no room
    for the file."""
    most = MOST if most is None else most
    held: list[Group] = []
    stream = iter(groups)
    for group in stream:
        held.append(group)
        if len(held) > most:
            return _written(held, stream)
    return held


def _written(first: list[Group], rest: Iterator[Group]) -> FileGroups:
    """The groups of ``first``, which is emptied, and of ``rest`` in a file."""
    written, ids = array("q"), bytearray()
    try:
        file = tempfile.TemporaryFile(buffering=_AT_ONCE)  # noqa: SIM115 (open for as long as it is read)
        for group in itertools.chain(_emptied(first), rest):
            ids += group.prompt.id.encode()  # which the written prompt then has, too
            written.append(file.write(pickle.dumps(group, pickle.HIGHEST_PROTOCOL)))
        file.flush()
    except OSError as error:
        raise DataError(
            f"{tempfile.gettempdir()}: no room for all groups of the data ({error}); make room, "
            "or set TMPDIR to a folder on a larger disk"
        ) from error
    sizes = np.array(written)
    return FileGroups(file, np.cumsum(sizes) - sizes, sizes, np.frombuffer(bytes(ids), "S16"))


def _emptied(groups: list[Group]) -> Iterator[Group]:
    groups.reverse()
    while groups:
        yield groups.pop()


def picked(groups: Groups, indices: np.ndarray) -> Groups:
    """The groups at ``indices`` ([n] int64), in that order."""
    return groups.pick(indices) if isinstance(groups, FileGroups) else [groups[i] for i in indices]


def prompt_ids(groups: Groups) -> np.ndarray:
    """[groups] S16: the prompt's id of each."""
    if isinstance(groups, FileGroups):
        return groups.prompt_ids
    return np.fromiter((group.prompt.id for group in groups), "S16")
