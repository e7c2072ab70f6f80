"""The process group is joined once a process; weights are rounded for as long as a context lasts."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from models.distributed import gather_objects, start, stop
from models.sharding import rounded
from tests.tiny import tiny_policy


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
    assert threads() <= before  # of other tests some may end
    stop()
    assert not dist.is_initialized()
    start()  # its groups are of the new process group, not of the one that is gone
    assert gather_objects("anew") == ["anew"]
    stop()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_rounded_within_and_as_they_were_behind_whatever_happens(dtype):
    policy = tiny_policy()
    before = [p.detach().clone() for p in policy.parameters()]
    with contextlib.suppress(KeyError), rounded(policy, dtype):
        for p, master in zip(policy.parameters(), before, strict=True):
            assert torch.equal(p, master.to(dtype).float())
        raise KeyError
    assert all(torch.equal(p, master) for p, master in zip(policy.parameters(), before, strict=True))
