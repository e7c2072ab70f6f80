"""The limits in which one clip shape is another, and the second moment that M2PO bounds."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.trainers.losses.family import PLAIN, RANGE, Batch, random_batch
from trainers.losses.grpo import grpo
from trainers.losses.shapes import SHAPES, beyond_moment, moment_limit, second_moments

FAR = math.inf
LIMITS = {
    "dual's bound to infinity is ppo": ({"shape": "dual", "dual_clip": FAR}, {}),
    "cispo's range to the point 1 is reinforce": ({"shape": "cispo", "epsilon": 0.0}, {"shape": "reinforce"}),
    "dppo's bound to infinity is ppo's": ({"shape": "dppo", "divergence_bound": FAR}, {"epsilon": FAR}),
    "m2po's bound to infinity is ppo's": ({"shape": "m2po", "moment_bound": FAR}, {"epsilon": FAR}),
    "cppo's prefix bound to infinity and its floor to 1 is dppo": (
        {"shape": "cppo", "prefix_bound": FAR, "weight_floor": 1.0},
        {"shape": "dppo"},
    ),
    "gmpo's range to infinity is a ratio a sequence": (
        {"shape": "gmpo", "epsilon": FAR},
        {"epsilon": FAR, "importance": "sequence"},
    ),
}
SAME_GRADIENT = {
    "cispo's range to infinity is ppo's": ({"shape": "cispo", "epsilon": FAR}, {"epsilon": FAR}),
    "sapo's tau to 0 is ppo without clipping": (
        {"shape": "sapo", "tau_positive": 1e-7, "tau_negative": 1e-7},
        {"epsilon": FAR},
    ),
}


def of(numbers, humanline=PLAIN, **batch):
    made = random_batch(**({"spread": 1.0} | batch))
    result, gradient = made.run(
        lambda scores, labels: grpo(scores, labels, **({"epsilon": 0.2, "beta": 0.01} | numbers)), humanline
    )
    return result.total.detach(), gradient


@pytest.mark.parametrize("humanline", [PLAIN, RANGE], ids=["plain", "humanline"])
@pytest.mark.parametrize(("one", "other"), LIMITS.values(), ids=LIMITS)
def test_limits(one, other, humanline):
    far_from_it = of({"epsilon": 0.2, "shape": one["shape"]}, spread=2.0)[1]
    assert (far_from_it != of(other, spread=2.0)[1]).any()
    for found, expected in zip(of(one, humanline, spread=2.0), of(other, humanline, spread=2.0), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("one", "other"), SAME_GRADIENT.values(), ids=SAME_GRADIENT)
def test_limits_of_the_gradient(one, other):
    torch.testing.assert_close(of(one)[1], of(other)[1], rtol=1e-6, atol=1e-9)


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


@pytest.mark.parametrize("normalization", ["token", "sequence"])
@pytest.mark.parametrize("shape", SHAPES)
def test_where_the_ratio_is_1_every_shape_has_the_gradient_of_reinforce(shape, normalization):
    expected = of({"shape": "reinforce", "normalization": normalization}, spread=0.0)[1]
    torch.testing.assert_close(of({"shape": shape, "normalization": normalization}, spread=0.0)[1], expected)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_corrections_weights_multiply_the_shapes_term_and_not_the_penalty(shape):
    """Token by token: a term is linear in its weight."""
    batch = random_batch(spread=1.0)
    scores = PLAIN.scores(batch.policy, batch.reference, batch.mask)
    numbers = {"epsilon": 0.2, "shape": shape}

    def total(weights, beta=0.0):
        return grpo(replace(scores, weights=weights), batch.labels, beta=beta, **numbers).total

    ones = torch.ones_like(batch.policy)
    penalty = total(0 * ones, beta=0.01)
    assert penalty > 0 == total(0 * ones)
    torch.testing.assert_close(total(ones), total(None))
    torch.testing.assert_close(total(3 * ones, beta=0.01), 3 * total(None) + penalty)
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
        ({"shape": None}, "shape=None: use one of"),
        ({"shape": "dual", "dual_clip": 1.0}, "dual_clip=1.0: must be above 1"),
        ({"shape": "sapo", "tau_positive": 0.0}, "tau_positive=0.0: must be above 0"),
        ({"shape": "sapo", "tau_negative": 0.0}, "tau_negative=0.0: must be above 0"),
        ({"shape": "dppo", "divergence": "js"}, "divergence=js: use tv or kl"),
        ({"shape": "cppo", "weight_floor": 0.0}, r"weight_floor=0.0: must lie in \(0, 1\]"),
    ],
)
def test_what_a_shape_refuses(numbers, said):
    with pytest.raises(ValueError, match=said):
        of(numbers)


squares = st.lists(st.sampled_from([0.0, 0.01, 0.04, 0.25, 1.0, 2.25, 9.0, math.inf]), max_size=12)


@settings(max_examples=200)
@given(squares=squares, bound=st.sampled_from([0.0, 0.01, 0.04, 0.3, 1.0, math.inf]), seed=st.integers(0, 99))
def test_as_few_tokens_go_as_it_takes_and_their_order_does_not_matter(squares, bound, seed):
    values = torch.tensor(squares, dtype=torch.float64)
    limit = moment_limit(values, bound)
    gone = beyond_moment(values, limit)
    members = values[values.isfinite()]
    left = values[values.isfinite() & ~gone]
    assert not len(left) or left.mean() <= bound + 1e-12
    if gone.any():  # with the next size it would be above
        again = members[members <= limit]
        assert again.mean() > bound - 1e-12
    order = torch.randperm(len(values), generator=torch.Generator().manual_seed(seed))
    assert torch.equal(moment_limit(values[order], bound), limit)


def test_only_tokens_that_ppo_could_clip_count_for_the_second_moment():
    batch = random_batch(spread=1.0)
    moved = second_moments(
        PLAIN.scores(batch.policy, batch.reference, batch.mask), batch.labels.unsqueeze(-1)
    )
    log_r = batch.policy - batch.reference
    driven = batch.mask & (log_r * batch.labels.unsqueeze(-1) > 0)
    assert torch.equal(moved.isfinite(), driven) and driven.any() and not driven[batch.mask].all()
    torch.testing.assert_close(moved[driven], log_r[driven] ** 2)


def test_a_mask_from_elsewhere_is_the_one_that_counts():
    """Of the global batch, that is, of which these rows are a part."""
    batch = random_batch(spread=1.0)
    scores = PLAIN.scores(batch.policy, batch.reference, batch.mask)
    numbers = {"epsilon": 0.2, "beta": 0.0, "shape": "m2po", "moment_bound": 0.0}
    alone = grpo(scores, batch.labels, **numbers)
    nothing = grpo(scores, batch.labels, torch.zeros_like(batch.mask), **numbers)
    assert float(alone.metrics["tokens_masked"].sum) > 0 == float(nothing.metrics["tokens_masked"].sum)
    assert torch.equal(nothing.total, grpo(scores, batch.labels, epsilon=FAR, beta=0.0).total)
    none = replace(batch, mask=torch.zeros_like(batch.mask))
    assert isinstance(none, Batch)
    assert grpo(PLAIN.scores(none.policy, none.reference, none.mask), none.labels, **numbers).total == 0
