"""Muon's update of sharded weights is that of whole ones, to the bit, and goes on from a checkpoint."""

from __future__ import annotations

import pytest
import torch

from models.distributed import start
from tests.distributed.optimizing import SHAPES, results, worker
from tests.programs import in_ranks


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    return results(tmp_path_factory.mktemp("single"), start())


@pytest.mark.parametrize(("ranks", "replicas"), [(3, 1), (4, 2)], ids=["3 ranks", "2 copies of 2 ranks"])
def test_ranks_change_nothing(single, tmp_path, ranks, replicas):
    in_ranks(worker, (ranks, replicas, str(tmp_path / "store"), str(tmp_path)), ranks)
    found = torch.load(tmp_path / "found.pt")
    assert set(map(str, SHAPES)) < set(found) == set(single)
    for name, value in single.items():
        if "norm" in name or "embed" in name or "lm_head" in name:  # AdamW rounds by the length of a shard
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6)
        else:
            assert torch.equal(found[name], value), name
