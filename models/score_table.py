"""Table of the log-probabilities of many rows by the row's key, whose values stay in the files that they were
read from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

Shard = Mapping[str, Tensor]
"""``keys`` [rows, width] uint8: each row's key, padded with zeros; ``ends`` [rows] int64: where each row's
values end; ``values`` [tokens] float32, nats."""


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
        return (key.decode() for key in self.keys)

    def place(self, key: str) -> int:
        """Return the position of ``key``. Raises KeyError."""
        wanted = key.encode()
        at = int(np.searchsorted(self.keys, wanted))
        if at == len(self.keys) or self.keys[at] != wanted:
            raise KeyError(key)
        return int(self._places[at])


class ScoreTable(Mapping[str, Tensor]):
    """Key -> [C] log-probabilities, nats, float32, CPU. For a key in several shards the last one counts."""

    def __init__(self, shards: Sequence[Shard] = ()) -> None:
        names = [_names(shard["keys"]) for shard in shards]
        ends = [shard["ends"].numpy() for shard in shards]
        starts = [np.append(0, end)[:-1] for end in ends]
        self._index = KeyIndex(np.concatenate([np.zeros(0, "S1"), *names]))
        self._values = [shard["values"] for shard in shards]
        self._shards = np.repeat(np.arange(len(shards)), [len(of) for of in names])
        self._starts = np.concatenate([np.zeros(0, np.int64), *starts])
        self._ends = np.concatenate([np.zeros(0, np.int64), *ends])

    def __len__(self) -> int:
        return len(self._index)

    def __iter__(self) -> Iterator[str]:
        return iter(self._index)

    def __getitem__(self, key: str) -> Tensor:
        at = self._index.place(key)
        return self._values[self._shards[at]][int(self._starts[at]) : int(self._ends[at])]

    def missing(self, keys: np.ndarray) -> np.ndarray:
        """Return [n] bool, which of ``keys`` ([n] byte strings) have no score."""
        return ~np.isin(keys, self._index.keys)


def _names(keys: Tensor) -> np.ndarray:
    """Return the keys as [rows] byte strings."""
    width = keys.shape[1]
    return np.ascontiguousarray(keys.numpy()).view(f"S{width}").reshape(-1)


def packed(scores: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the shard that holds these scores."""
    names = np.array([key.encode() for key in scores], "S")
    width = max(1, names.dtype.itemsize)
    keys = np.frombuffer(names.astype(f"S{width}").tobytes(), np.uint8).reshape(-1, width)
    ends = np.cumsum([len(values) for values in scores.values()], dtype=np.int64)
    values = [torch.zeros(0), *(values.float().cpu() for values in scores.values())]
    return {
        "keys": torch.from_numpy(keys.copy()),
        "ends": torch.from_numpy(ends),
        "values": torch.cat(values),
    }
