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


def test_a_run_on_several_ranks_looks_once_whether_its_forward_gathers_what_it_keeps(tmp_path, monkeypatch):
    looked: list[Any] = []
    monkeypatch.setattr("jobs.step_log.check_gathered_weights", looked.append)
    at: Any = SimpleNamespace(world=SimpleNamespace(size=2, is_main=False), progress=SimpleNamespace(step=0))
    log: Any = StepLog(tmp_path, at, 4)
    log.flush, log._of_round = lambda: None, lambda record: {}
    for _ in range(3):
        log.step_begins()
        log.step_ends(SimpleNamespace(known={}))
    assert looked == [at]
