"""The memory plan against ranks that talk to each other."""

from __future__ import annotations

import pytest

from common.worker_process import WorkerProcess
from memory.fit import with_settings
from tests.memory_questions import WAYS, question
from tests.real_memory import real_peaks


def test_the_fullest_rank_takes_what_was_planned(quick_python: None) -> None:
    ranks = 2
    asked = [question("deep", ranks=ranks), question("wide", *WAYS["checkpointed LoRA"], ranks=ranks)]
    asked.append(question("deep", "model.reshard_after_forward=false", ranks=ranks))
    asked.append(question("deep", loss="grpo", ranks=ranks))
    worker = WorkerProcess("memory.plan", log=None, env={"OMP_NUM_THREADS": "1"})
    try:
        found = [worker.call("answer", one, timeout=300) for one in asked]
    finally:
        worker.close()
    planned = [max(sum(parts.values()) for parts in one.peaks.values()) for one in found]
    kept = with_settings(asked[2], reshard_after_forward=None)  # the ranks keep layers gathered, as by a plan
    assert [*planned, planned[2]] == pytest.approx(real_peaks([*asked, kept]), rel=0.1)
