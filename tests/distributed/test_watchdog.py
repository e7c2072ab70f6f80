"""The watchdog names who is waited for."""

from __future__ import annotations

from models.distributed import slow_ranks


def test_the_rank_that_is_not_where_the_others_are_is_named():
    said = slow_ranks(["step 7, under way", "step 7, under way", "step 6, ready", "step 7, under way"], 300)
    assert (
        said
        == "no rank has moved for 300 s; most are at: step 7, under way; waited for: rank 2: step 6, ready"
    )


def test_a_hang_of_all_is_said_to_be_one():
    assert "all are at: step 7, under way" in slow_ranks(["step 7, under way"] * 4, 300)
