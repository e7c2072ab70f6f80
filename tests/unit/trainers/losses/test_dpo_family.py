"""What differs from DPO by a number, and SPPO: against a few lines of numpy in float64."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from trainers.losses.base import TokenScores
from trainers.losses.dpo import dpo, implied_reward
from trainers.losses.sppo import sppo

LENGTHS = ((4, 2, 5), (3, 6, 1))


def pairs(seed: int):
    """(chosen, rejected, their rows as (policy, reference)): float64, of uneven lengths."""
    rng = np.random.default_rng(seed)
    sides, rows = [], []
    for lengths in LENGTHS:
        made = [(rng.normal(-1, 0.7, n), rng.normal(-1, 0.7, n)) for n in lengths]
        grid = torch.zeros(2, len(lengths), max(lengths), dtype=torch.float64)
        for r, (p, q) in enumerate(made):
            grid[0, r, : len(p)], grid[1, r, : len(q)] = torch.tensor(p), torch.tensor(q)
        policy, reference = grid[0].clone().requires_grad_(), grid[1]
        mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
        sides.append(TokenScores(policy, reference, policy - reference, mask))
        rows.append(made)
    return *sides, list(zip(*rows, strict=True))


def f_prime(u: float, divergence: str, alpha: float) -> float:
    return {
        "reverse_kl": math.log(u),
        "forward_kl": -1 / u,
        "js": math.log(2 * u / (1 + u)),
        "alpha": (1 - u**-alpha) / alpha,
    }[divergence]


@pytest.mark.parametrize("divergence", ["reverse_kl", "forward_kl", "js", "alpha"])
@pytest.mark.parametrize(("normalized", "nll"), [(False, 0.0), (True, 0.3)])
def test_dpo_and_its_relatives(divergence, normalized, nll):
    numbers = {"beta": 0.2, "length_normalized": normalized, "nll_weight": nll}
    for seed in range(4):
        chosen, rejected, rows = pairs(seed)
        wanted = 0.0
        for (pw, qw), (pl, ql) in rows:
            ratios = [(p - q).mean() if normalized else (p - q).sum() for p, q in ((pw, qw), (pl, ql))]
            w, lose = (f_prime(math.exp(s), divergence, 0.3) for s in ratios)
            wanted += math.log1p(math.exp(-0.2 * (w - lose))) - nll * pw.mean()
        total = dpo(chosen, rejected, divergence=divergence, divergence_alpha=0.3, **numbers).total
        assert total.item() == pytest.approx(wanted, rel=1e-12)


def test_divergences_are_exact_in_their_limits_and_finite_far_away():
    s = torch.linspace(-3, 3, 25, dtype=torch.float64)
    torch.testing.assert_close(implied_reward(s, "alpha", 1e-7), s, atol=1e-5, rtol=0)
    torch.testing.assert_close(implied_reward(s, "alpha", 1 - 1e-9), implied_reward(s, "forward_kl", 0.5))
    for name in ("forward_kl", "js", "alpha"):
        assert abs(implied_reward(torch.zeros(1), name, 0.5)) < 1e-7, "0 where nothing has moved"
    far = torch.tensor([-500.0], requires_grad=True)
    for name in ("forward_kl", "alpha"):
        implied_reward(far, name, 0.9).sum().backward()
        assert torch.isfinite(far.grad).all()


@pytest.mark.parametrize(
    ("divergence", "alpha"), [("kl", 0.5), ("alpha", 0.0), ("alpha", 1.0), ("alpha", math.nan)]
)
def test_an_unknown_divergence_is_an_error(divergence, alpha):
    with pytest.raises(ValueError, match=f"divergence={divergence}"):
        implied_reward(torch.zeros(1), divergence, alpha)


def test_sppo():
    chosen, rejected, rows = pairs(7)
    gains = [((pw - qw).sum(), (pl - ql).sum()) for (pw, qw), (pl, ql) in rows]
    wanted = sum((w - 3.0 * (1 - 0.5)) ** 2 + (lose - 3.0 * (0 - 0.5)) ** 2 for w, lose in gains)
    assert sppo(chosen, rejected, eta=3.0).total.item() == pytest.approx(wanted, rel=1e-12)


def test_the_chosen_and_the_rejected_rows_keep_all_that_was_scored():
    grid = torch.arange(10.0).reshape(5, 2)
    beside = {"weights": grid + 30, "anchor": grid + 50, "entropy": grid + 60}
    whole = TokenScores(grid, grid + 10, grid + 20, grid > 0, **beside)
    chosen, rejected = whole.split(2)
    for name, value in vars(whole).items():
        assert torch.equal(getattr(chosen, name), value[:2]), name
        assert torch.equal(getattr(rejected, name), value[2:]), name
    assert replace(whole, weights=None).split(2)[0].weights is None
