"""Updates of sharded weights are those of whole ones, to the bit, and go on from a checkpoint: Muon's, and
those of 8-bit moments."""

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


def test_ranks_change_nothing_in_8_bits(with_torchao, tmp_path):
    """Two ranks go on with what one wrote, and are where it is."""
    found = {}
    for ranks, replicas in ((1, 1), (2, 1), (4, 2)):
        arguments = (ranks, replicas, str(tmp_path / f"store-{ranks}"), str(tmp_path))
        in_ranks("tests.distributed.eight_bits:worker", arguments, ranks)
        found[ranks] = torch.load(tmp_path / f"found-{ranks}.pt")
    assert any(value.dtype == torch.uint8 for value in found[1].values())
    for ranks in (2, 4):
        assert set(found[ranks]) == set(found[1])
        for name, value in found[1].items():
            assert torch.equal(found[ranks][name], value), (ranks, name)
    for name, value in found[1].items():
        if name.startswith("from one rank, "):
            assert torch.equal(found[1][name.removeprefix("from one rank, ")], value)
