"""Mappings from training rows to their log-probabilities under the initial weights, built for many rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from data.types import Example
from jobs.plan import Plan
from models.reference import Reference
from models.score_cache import KeyIndex


class PlannedBatches(Sequence[list[Example]]):
    """The global batches of some steps of a run; each is made on access."""

    def __init__(self, plan: Plan, steps: range) -> None:
        self.plan, self.steps = plan, steps

    def __len__(self) -> int:
        return len(self.steps)

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return PlannedBatches(self.plan, self.steps[at])
        return self.plan.train.batch(self.steps[at])


class OfRows(Mapping[str, Tensor]):
    """Row key -> [C] log-probabilities, nats, of every row of ``batches``.

    A row in several batches has the scores of the last one."""

    def __init__(
        self, scores: Mapping[str, Tensor], batches: Sequence[list[Example]], reference: Reference
    ) -> None:
        """``scores``: the result of ``initial_scores`` for these batches, with the keys of ``reference``."""
        self._scores, self._by_row = scores, reference.by_row
        keys, counts = [np.zeros(0, "S32")], []
        for batch in batches:
            rows = [row.key.encode() for example in batch for row in example.rows]
            keys.append(np.array(rows, "S32"))
            counts.append(len(rows))
        self._index = KeyIndex(np.concatenate(keys))
        self._steps = np.repeat(np.arange(len(counts)), counts)

    def __len__(self) -> int:
        return len(self._index)

    def __iter__(self) -> Iterator[str]:
        """Yield the keys in the order in which the scores lie, or else of the steps that have them."""
        if not self._by_row:
            return iter(self._index)
        return (key for key in self._scores if key in self._index)

    def __getitem__(self, key: str) -> Tensor:
        step = self._steps[self._index.place(key)]
        return self._scores[key if self._by_row else f"{step}/{key}"]


class CompletionSums(Mapping[str, float]):
    """Row key -> log-probability of the row's whole completion, nats."""

    def __init__(self, scores: Mapping[str, Tensor]) -> None:
        self._scores = scores

    def __len__(self) -> int:
        return len(self._scores)

    def __iter__(self) -> Iterator[str]:
        return iter(self._scores)

    def __getitem__(self, key: str) -> float:
        return float(self._scores[key].sum())
