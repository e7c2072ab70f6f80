"""Each clip shape against its float64 formula written independently: value, gradient, and the tokens that it
clips or masks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.golden import shape_formulas
from tests.golden.test_losses import RANGES, SCENARIOS, T, make, scores
from trainers.losses.grpo import grpo
from trainers.losses.shapes import SHAPES

DTYPES = {
    torch.float32: 4e-6,
    torch.float64: 1e-12,
}  # float32 rounds a mean of log-ratios before its exponential
ADVANTAGES = (1.0, -1.0, 0.5, -2.0, 0.0)
RANGE = {"epsilon": 0.2, "epsilon_high": 0.28}
NUMBERS = [
    ("ppo", RANGE),
    ("dual", RANGE | {"dual_clip": 3.0}),
    ("dual", {"epsilon": 0.3, "epsilon_high": 0.1, "dual_clip": 1.5, "importance": "sequence"}),
    ("dual", {"epsilon": 0.2, "epsilon_high": 4.0, "dual_clip": 1.5}),  # c is below the range: of A < 0 alone
    ("cispo", RANGE),
    ("cispo", RANGE | {"importance": "sequence", "normalization": "sequence"}),
    ("reinforce", {}),
    ("reinforce", {"normalization": "sequence"}),
    ("sapo", {"tau_positive": 1.0, "tau_negative": 1.05}),
    ("sapo", {"tau_positive": 2.0, "tau_negative": 5.0, "importance": "sequence"}),
    ("dppo", {"divergence": "tv", "divergence_bound": 0.15}),
    ("dppo", {"divergence": "kl", "divergence_bound": 0.05, "normalization": "sequence"}),
]


def probable(rows):
    """The rows with every log-probability below 0, and the same log-ratios."""
    above = np.maximum(np.maximum(rows.policy, rows.reference) + 1 / 32, 0)
    return replace(rows, policy=rows.policy - above, reference=rows.reference - above)


def test_every_shape_has_its_golden():
    assert {shape for shape, _ in NUMBERS} == set(SHAPES)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("clip", RANGES)
@pytest.mark.parametrize(("shape", "numbers"), NUMBERS, ids=lambda x: x if isinstance(x, str) else "")
def test_shapes(shape, numbers, clip, dtype):
    """Advantages of both signs and none, ratios below, inside and above the range, humanline on and off."""
    everything = 0
    for seed, scenario in enumerate(SCENARIOS):
        rows = probable(make([*range(T + 1)] * len(ADVANTAGES), scenario, clip, seed=seed))
        A = np.repeat(ADVANTAGES, T + 1)
        leaf, made = scores(rows, dtype)
        given = {"epsilon": 0.2} | numbers
        result = grpo(made, torch.tensor(A, dtype=dtype), beta=0.01, shape=shape, **given)
        total, gradient, flagged = shape_formulas.shaped(rows, A, shape, beta=0.01, **numbers)
        np.testing.assert_allclose(
            float(result.total.detach()), total, rtol=DTYPES[dtype], atol=DTYPES[dtype]
        )
        (slopes,) = torch.autograd.grad(result.total, leaf)
        np.testing.assert_allclose(slopes.double().numpy(), gradient, rtol=DTYPES[dtype], atol=DTYPES[dtype])
        found = {
            name: int(x.sum) for name, x in result.metrics.items() if "clipped" in name or "masked" in name
        }
        assert sum(found.values()) == flagged, scenario
        everything += flagged
    assert (everything > 0) == (shape not in ("reinforce", "sapo"))


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape != "cispo"])
def test_gradients_are_those_of_the_values(shape):
    """By central differences of the loss itself, where no token is so near a bound that a mask moves. CISPO's
    weight moves with the policy and has no gradient, so it does not descend its value."""
    rows = probable(make([T] * 4, "near", "plain", seed=9))
    A = torch.tensor([1.0, -1.0, 0.5, -2.0], dtype=torch.float64)
    leaf, made = scores(rows, torch.float64)
    numbers = {"epsilon": 0.2, "beta": 0.1, "divergence_bound": 0.05, "shape": shape}
    (gradient,) = torch.autograd.grad(grpo(made, A, **numbers).total, leaf)
    for place in np.ndindex(rows.policy.shape):
        ends = []
        for step in (1e-6, -1e-6):
            moved = replace(rows, policy=rows.policy.copy())
            moved.policy[place] += step
            _, there = scores(moved, torch.float64)
            ends.append(float(grpo(there, A, **numbers).total.detach()))
        assert (ends[0] - ends[1]) / 2e-6 == pytest.approx(float(gradient[place]), rel=1e-6, abs=1e-8)
