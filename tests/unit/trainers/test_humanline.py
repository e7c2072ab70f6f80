"""Humanline: the clip and its gradient, exactness when off, the fractions logged; random rejection in its
place."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.errors import ConfigError
from tests.unit.trainers.test_sampling import beta
from trainers.humanline import Humanline, RejectionKey, rule_of

PAPER = Humanline(-1.5, 1.5)


def scored(log_ratios, humanline, mask=None):
    policy = torch.tensor([log_ratios], requires_grad=True)
    mask = torch.ones(1, len(log_ratios), dtype=torch.bool) if mask is None else torch.tensor([mask])
    return policy, humanline.scores(policy, torch.zeros_like(policy.detach()), mask)


def test_clipping_clamps_in_log_space_and_stops_the_gradient_outside():
    policy, scores = scored([-80.0, -1.6, -1.4, 0.0, 1.4, 1.6, 80.0], PAPER)
    assert scores.log_ratio.tolist() == [[-1.5, -1.5, pytest.approx(-1.4), 0.0, pytest.approx(1.4), 1.5, 1.5]]
    gradient = torch.autograd.grad(scores.log_ratio.sum(), policy)[0]
    assert gradient.tolist() == [[0.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0]]
    assert scores.policy is policy and not scores.reference.any(), "the raw log-probabilities stay"
    assert scored([-3.0, 3.0], Humanline(-0.5, 2.0))[1].log_ratio.tolist() == [[-0.5, 2.0]]


@given(
    st.lists(st.tuples(st.floats(-1e4, 0, width=32), st.floats(-1e4, 0, width=32)), min_size=1, max_size=20)
)
def test_off_is_the_plain_difference_bit_for_bit(values):
    policy, reference = (torch.tensor([[v[i] for v in values]]) for i in (0, 1))
    policy.requires_grad_()
    scores = Humanline().scores(policy, reference, torch.ones(1, len(values), dtype=torch.bool))
    assert torch.equal(scores.log_ratio, policy - reference)
    assert torch.equal(torch.autograd.grad(scores.log_ratio.sum(), policy)[0], torch.ones_like(policy))
    found = Humanline().metrics(scores)
    assert float(found["clipped_low"].sum) == float(found["clipped_high"].sum) == 0.0


def test_the_fractions_are_over_the_mask_and_of_the_raw_log_ratios():
    """What lies on a bound is not beyond it."""
    values = [-2.0, 2.0, 2.5, 1.5, -1.5, 0.0, -99.0, math.nan]
    _, scores = scored(values, PAPER, mask=[True] * 6 + [False] * 2)
    found = {name: (float(x.sum), int(x.count)) for name, x in PAPER.metrics(scores).items()}
    assert found == {"kl": (2.5, 6), "clipped_low": (1.0, 6), "clipped_high": (2.0, 6)}


SAMPLING = Humanline(sampling=beta(10.0, 10.0, 2.0, 20.0, 2.0, 20.0), seed=3)


def rejecting(rows: list[int], width: int, step: int = 5):
    """Of 8 rows of 50 tokens those, cut to a width: (log-ratios, scores, where a gradient passes, key)."""
    values = 2 * torch.randn(8, 50, generator=torch.Generator().manual_seed(0))
    policy = values[rows, :width].requires_grad_()
    mask, key = torch.ones_like(policy, dtype=torch.bool), RejectionKey(step, [f"row {r}" for r in rows])
    scores = SAMPLING.scores(policy, torch.zeros_like(policy), mask, key)
    return policy, scores, torch.autograd.grad(scores.log_ratio.sum(), policy)[0], key


def test_rejected_tokens_keep_their_value_and_lose_their_gradient():
    """The draw is the row's own, however the batch is cut and however wide it is padded; another at every
    step."""
    policy, scores, gradient, key = rejecting([*range(8)], 50)
    assert torch.equal(scores.log_ratio, policy) and set(gradient.unique().tolist()) == {0.0, 1.0}
    found = SAMPLING.metrics(scores, key)
    assert set(found) == {"kl", "rejected"}
    assert float(found["rejected"].sum) == int((gradient == 0).sum()) and int(found["rejected"].count) == 400
    for rows, width in ([4, 1], 50), ([2], 17):
        assert torch.equal(rejecting(rows, width)[2], gradient[rows, :width])
    assert not torch.equal(rejecting([*range(8)], 50, step=6)[2], gradient)


def shrunk(log_ratio: torch.Tensor, *, by: float) -> torch.Tensor:
    return log_ratio / by


def test_a_rule_of_ones_own_takes_the_place_of_clipping():
    named = {"_target_": f"{__name__}.shrunk"}
    own = Humanline(rule=rule_of(named | {"by": 4}))
    policy, scores = scored([-8.0, 0.0, 2.0], own)
    assert scores.log_ratio.tolist() == [[-2.0, 0.0, 0.5]]
    assert torch.autograd.grad(scores.log_ratio.sum(), policy)[0].tolist() == [[0.25] * 3]
    told = own.metrics(scores)
    assert set(told) == {"kl", "changed"} and (told["changed"].sum, told["changed"].count) == (2, 3)
    for wrong in (named, named | {"by": 4, "width": 1}, {"_target_": "math.fsum"}):
        with pytest.raises(ConfigError, match="humanline_rule"):
            rule_of(wrong)
