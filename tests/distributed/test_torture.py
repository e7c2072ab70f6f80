"""The short form of the torture: two ranks, killed, asked to stop and damaged a few times."""

from __future__ import annotations

from tests.distributed.torture import torture
from tests.tiny import save_tiny_adder


def test_a_run_that_is_killed_and_damaged_ends_like_the_undisturbed_one(tmp_path):
    model = save_tiny_adder(tmp_path / "model")
    small = (f"model.name_or_path={model}",)
    done = torture(tmp_path, kills=3, steps=20, seed=3, more=small)
    assert sum(done.values()) >= 2
