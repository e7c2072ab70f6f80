"""A base in 4 bits under LoRA is the same on however many ranks, and goes on from a checkpoint."""

from __future__ import annotations

import torch

from tests.programs import in_ranks


def test_ranks_change_nothing_in_4_bits(tmp_path):
    """The bytes to the bit; what is trained on them but for rounding, as without."""
    found = {}
    for ranks, replicas in ((1, 1), (2, 1), (3, 1), (4, 2)):
        arguments = (ranks, replicas, str(tmp_path / f"store-{ranks}"), str(tmp_path))
        in_ranks("tests.distributed.four_bits:worker", arguments, ranks)
        found[ranks] = torch.load(tmp_path / f"found-{ranks}.pt")
    assert any(value.dtype == torch.uint8 for value in found[1].values())
    for ranks in (2, 3, 4):
        assert set(found[ranks]) == set(found[1])
        for name, value in found[1].items():
            same = value.dtype == torch.uint8 or name.startswith("from one rank, ")
            torch.testing.assert_close(
                found[ranks][name], value, rtol=0, atol=0 if same else 2e-4, msg=lambda m, n=name: f"{n}: {m}"
            )
