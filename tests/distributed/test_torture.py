"""The short form of the torture: two ranks by torchrun, killed, asked to stop and damaged a few times."""

from __future__ import annotations

from tests.distributed.torture import forked, torture


def test_a_run_that_is_killed_and_damaged_ends_like_the_undisturbed_one(tmp_path):
    done = torture(tmp_path, kills=4, steps=24, seed=3, start=forked)
    assert sum(done.values()) >= 3
