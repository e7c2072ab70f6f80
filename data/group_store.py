"""Storage for groups in order: a few are kept in memory, many in a temporary file.

The file has no name and disappears with the process that made it. It lies in the folder for temporary files
(TMPDIR). A group is read from it each time it is needed.
"""

from __future__ import annotations

import itertools
import os
import pickle
import tempfile
from array import array
from collections.abc import Iterable, Sequence
from typing import IO, Any

import numpy as np

from common.errors import DataError
from common.files import temporary_folder
from data.types import Group

MOST = 20_000
"""Most groups that are kept in memory; with two answers of 200 words each they take about 50 MB."""
_AT_ONCE = 1 << 20
"""Bytes that are collected before they are written."""

Groups = Sequence[Group]


class FileGroups(Sequence[Group]):
    """Groups in a file, which take 32 bytes of memory each. A selection of them reads from the same file."""

    def __init__(self, file: IO[bytes], starts: np.ndarray, sizes: np.ndarray, ids: np.ndarray) -> None:
        """``starts`` and ``sizes`` are [groups] int64, in bytes. ``ids`` are the ids of the groups' prompts,
        [groups] S16."""
        self._file, self._starts, self._sizes, self.prompt_ids = file, starts, sizes, ids

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return self.pick(np.arange(len(self))[at])
        size = int(self._sizes[at])
        # pread needs no file position, which threads and forked processes would share
        return pickle.loads(os.pread(self._file.fileno(), size, int(self._starts[at])))

    def pick(self, indices: np.ndarray) -> FileGroups:
        """Return the groups at ``indices`` ([n] int64), in that order."""
        return FileGroups(self._file, self._starts[indices], self._sizes[indices], self.prompt_ids[indices])


def gathered(groups: Iterable[Group], most: int | None = None) -> Groups:
    """Return all of ``groups``: a list, or a file if there are more than ``most`` (default: MOST). Raises
    DataError if there is no room for the file."""
    most = MOST if most is None else most
    stream = iter(groups)
    held = list(itertools.islice(stream, most + 1))
    return held if len(held) <= most else _written(itertools.chain(held, stream))


def _written(groups: Iterable[Group]) -> FileGroups:
    """Write the groups to a file."""
    written, ids = array("q"), bytearray()
    try:
        file = tempfile.TemporaryFile(buffering=_AT_ONCE)  # noqa: SIM115 (open for as long as it is read)
        for group in groups:
            ids += group.prompt.id.encode()  # also caches the id in the prompt, which is pickled next
            written.append(file.write(pickle.dumps(group, pickle.HIGHEST_PROTOCOL)))
        file.flush()
    except OSError as error:
        raise DataError(
            f"{temporary_folder()}: no room for all groups of the data ({error}); make room, "
            "or set TMPDIR to a folder on a larger disk"
        ) from error
    sizes = np.array(written)
    return FileGroups(file, np.cumsum(sizes) - sizes, sizes, np.frombuffer(bytes(ids), "S16"))


def picked(groups: Groups, indices: np.ndarray) -> Groups:
    """Return the groups at ``indices`` ([n] int64), in that order."""
    return groups.pick(indices) if isinstance(groups, FileGroups) else [groups[i] for i in indices]


def prompt_ids(groups: Groups) -> np.ndarray:
    """Return the id of each group's prompt, [groups] S16."""
    if isinstance(groups, FileGroups):
        return groups.prompt_ids
    return np.fromiter((group.prompt.id for group in groups), "S16")
