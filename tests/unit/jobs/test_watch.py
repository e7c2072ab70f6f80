"""What a run shows while it goes on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from common.progress import progress
from data.batches import Segment
from jobs.step_log import StepLog


@pytest.mark.parametrize(
    ("examples", "end", "done", "total"),
    [(16, 0.25, 0, 8), (16, 0.5, 3, 10), (0, 0.5, 3, 6), (0, 0.0, 0, 100)],
)
def test_rounds_to_come_count_as_those_so_far_and_an_empty_first_one_says_nothing(
    examples: int, end: float, done: int, total: int
) -> None:
    with progress(100, "train", shown=False) as bar:
        at: Any = SimpleNamespace(progress=SimpleNamespace(step=done, position=0))
        watch: Any = SimpleNamespace(trainer=at, bar=bar)
        StepLog.round_planned(watch, Segment((), 8, examples, seed=0, end=end))
        assert bar.total == total
