"""What is added up of the tokens: against loops over them, however the rows are cut, and after a restart."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from jobs.diagnostics import BINS, EDGES, SIDES, Tally
from models.distributed import start

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def processes():
    start()


def rows(seed: int, n: int = 40, width: int = 70):
    """Rows of every side, length and order of magnitude; what the mask hides is no number."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, width + 1, n)
    mask = torch.from_numpy(np.arange(width) < lengths[:, None])
    raw = torch.from_numpy(rng.choice([-1, 1], (n, width)) * 10.0 ** rng.uniform(-8, 1.6, (n, width))).float()
    raw = torch.where(mask, raw, torch.nan)
    moved = torch.from_numpy(rng.normal(size=n)).float()
    known = torch.from_numpy(rng.random(n) < 0.7) & mask.any(-1)
    return torch.from_numpy(rng.integers(0, 3, n)), raw, mask, torch.where(known, moved, torch.nan), known


def filled(*parts) -> Tally:
    tally = Tally(-1.5, 1.5, CPU)
    for part in parts:
        tally.add(*part)
    return tally


def test_it_is_what_a_loop_over_the_tokens_counts():
    side, raw, mask, moved, known = rows(0)
    tally = filled(rows(0))
    for s, (name, found) in enumerate(tally.describe(tally.total()).items()):
        own = [r for r in range(len(side)) if side[r] == s]
        mine = [[float(x) for x, m in zip(raw[r], mask[r], strict=True) if m] for r in own]
        tokens = [x for row in mine for x in row]
        histogram = [0] * BINS
        for x in tokens:
            histogram[next((k for k, edge in enumerate(EDGES) if x <= edge), BINS - 1)] += 1
        expected = [r for r in own if known[r]]
        drift = sum(float(moved[r]) for r in expected) / sum(int(mask[r].sum()) for r in expected)
        assert name == SIDES[s] and found["histogram"] == histogram
        assert found["rows"] == sum(map(bool, mine)) and found["tokens"] == len(tokens)
        assert found["below"] == sum(x < -1.5 for x in tokens) > 0
        assert found["above"] == sum(x > 1.5 for x in tokens) > 0
        assert found["log_ratio"] == pytest.approx(np.mean(tokens), rel=1e-5)
        assert found["spread"] == pytest.approx(np.sqrt(np.mean(np.square(tokens))), rel=1e-5)
        assert found["drift"] == pytest.approx(drift, rel=1e-4)


def test_how_the_rows_are_cut_and_padded_does_not_matter():
    whole, wide = filled(rows(1)), []
    for k in range(0, 40, 7):
        side, raw, mask, *rest = (column[k : k + 7] for column in rows(1))
        pad = torch.nn.functional.pad
        wide.append((side, pad(raw, (0, 9), value=3.0), pad(mask, (0, 9)), *rest))
    cut = filled(*reversed(wide))
    assert cut.describe(cut.total()) == whole.describe(whole.total())


def test_a_restart_in_between_changes_nothing_to_the_bit():
    whole, before = filled(rows(2), rows(3)), filled(rows(2))
    after = Tally(-1.5, 1.5, CPU)
    after.restore(before.total(), mine=True)
    after.add(*rows(3))
    assert after.total() == whole.total() != before.total()
    after.restore(before.total(), mine=False)  # a rank that another one took the sums over from
    assert not after.sums.any()
    whole.sums.zero_()
    assert whole.describe(whole.total()) == {}
