"""The process group is joined once a process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from models.distributed import gather_objects, start, stop


def threads() -> int:
    return len(list(Path("/proc/self/task").glob("*")))


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted by /proc")
def test_who_starts_again_joins_what_is_there():
    stop()
    start()
    gather_objects("so that its threads are there")
    before = threads()
    for _ in range(3):
        assert start().size == 1
        assert gather_objects("again") == ["again"]
    assert threads() == before
    stop()
    assert not dist.is_initialized()
    start()  # its groups are of the new process group, not of the one that is gone
    assert gather_objects("anew") == ["anew"]
    stop()
