"""What clip shapes have in common, beside their values (tests/golden/test_shapes.py)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.unit.trainers.losses.family import PLAIN, RANGE, random_batch
from trainers.losses.grpo import grpo
from trainers.losses.shapes import SHAPES


def of(numbers, humanline=PLAIN, **batch):
    made = random_batch(**({"spread": 1.0} | batch))
    result, gradient = made.run(
        lambda scores, labels: grpo(scores, labels, **({"epsilon": 0.2, "beta": 0.01} | numbers)), humanline
    )
    return result.total.detach(), gradient


def test_with_humanline_cispo_and_reinforce_keep_the_gradient_beyond_its_range():
    """They take log pi itself; every other shape reads the clipped log-ratio alone."""
    batch = random_batch(spread=3.0)
    raw = batch.policy - batch.reference
    beyond = batch.mask & ((raw < -1.5) | (raw > 1.5))
    assert beyond.any()
    for shape in SHAPES:
        gradient = of({"shape": shape, "beta": 0.0}, RANGE, spread=3.0)[1]
        assert gradient[beyond].all() if shape in ("cispo", "reinforce") else not gradient[beyond].any(), (
            shape
        )


@pytest.mark.parametrize("shape", SHAPES)
def test_a_corrections_weights_multiply_the_shapes_term_and_neither_penalty_nor_bonus(shape):
    """Token by token: a term is linear in its weight."""
    batch = random_batch(spread=1.0)
    scores = replace(
        PLAIN.scores(batch.policy, batch.reference, batch.mask), entropy=torch.rand_like(batch.policy)
    )
    numbers = {"epsilon": 0.2, "shape": shape}

    def total(weights, **more):
        numbers_of_terms = {"beta": 0.0, **numbers, **more}
        return grpo(replace(scores, weights=weights), batch.labels, **numbers_of_terms).total

    ones = torch.ones_like(batch.policy)
    for more, sign in ({"beta": 0.01}, 1), ({"entropy_bonus": 0.01}, -1):
        apart = total(0 * ones, **more)
        assert sign * apart > 0 == total(0 * ones)
        torch.testing.assert_close(total(3 * ones, **more), 3 * total(None) + apart)
    torch.testing.assert_close(total(ones), total(None))
    halves = (torch.arange(ones.shape[1]) % 2).expand_as(ones).double()
    torch.testing.assert_close(total(halves) + total(1 - halves), total(None))
    assert abs(float(total(halves) - total(1 - halves))) > 1e-3


@pytest.mark.parametrize("shape", SHAPES)
def test_nothing_overflows(shape):
    """A ratio of e^200 is inf in float32: wherever a shape bounds or masks it, value and gradient are finite,
    and an inf is one of the loss, never a nan of its gradient."""
    policy = torch.tensor([[-1.0, -201.0]] * 2, requires_grad=True)
    reference = torch.tensor([[-201.0, -1.0]] * 2)
    scores = PLAIN.scores(policy, reference, torch.ones(2, 2, dtype=torch.bool))
    numbers = {"epsilon": 0.2, "beta": 0.0, "shape": shape}
    result = grpo(scores, torch.tensor([1.0, -1.0]), **numbers)
    (gradient,) = torch.autograd.grad(result.total, policy)
    assert not gradient.isnan().any()
    finite = gradient.isfinite()
    bounded = {"dual", "cispo", "reinforce", "sapo"}  # on either side; the others let r grow where A < 0
    assert finite.all() if shape in bounded else finite[0].all() and finite[1, 1]


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        ({"shape": "trpo"}, "shape=trpo: use one of ppo, dual"),
        *(({key: "none"}, f"{key}=none") for key in ("importance", "normalization")),
        ({"normalization": "constant"}, "normalization"),
        ({"shape": "dual", "dual_clip": 1.0}, "dual_clip=1.0: must be above 1"),
        ({"shape": "sapo", "tau_positive": 0.0}, "tau_positive=0.0: must be above 0"),
        ({"shape": "dppo", "divergence": "js"}, "divergence=js: use tv or kl"),
    ],
)
def test_what_a_shape_refuses(numbers, said):
    with pytest.raises(ValueError, match=said):
        of(numbers)
