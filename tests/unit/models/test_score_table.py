"""Scores in shards are found by their keys, whatever the keys, and take no memory of their own."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from models.score_cache import ScoreCache
from models.score_table import ScoreTable, packed

KEYS = st.text("0123456789abcdef/", min_size=1, max_size=40)
SHARDS = st.lists(
    st.dictionaries(KEYS, st.lists(st.floats(-9, 0, width=32), max_size=5), max_size=6), max_size=4
)


@given(SHARDS, st.lists(KEYS, max_size=5))
def test_the_last_shard_that_has_a_key_counts(shards, others):
    want = {key: values for shard in shards for key, values in shard.items()}
    table = ScoreTable([packed({k: torch.tensor(v) for k, v in shard.items()}) for shard in shards])
    assert {key: values.tolist() for key, values in table.items()} == want and len(table) == len(want)
    keys = [*want, *others]
    missing = table.missing(np.array([key.encode() for key in keys], "S"))
    assert missing.tolist() == [key not in want for key in keys]
    for key in others:
        if key not in want:
            with pytest.raises(KeyError):
                table[key]
        assert table.get(key) is None or table[key].dtype == torch.float32


def test_a_row_takes_less_than_a_hundred_bytes(tmp_path):
    cache = ScoreCache(tmp_path, {}, rank=0)
    for shard in range(2):
        cache.write({f"{i}/{shard:032x}": torch.full((50,), -float(i)) for i in range(4_000)})
    tracemalloc.start()
    table = ScoreTable(list(cache.shards().values()))
    left, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert left / 8_000 < 100 and table[f"7/{1:032x}"].tolist() == [-7.0] * 50
