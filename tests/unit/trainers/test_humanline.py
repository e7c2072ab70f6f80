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
    _, scores = scored(
        [-2.0, 2.0, 2.5, 1.5, -1.5, 0.0, -99.0, math.nan], PAPER, mask=[True] * 6 + [False] * 2
    )
    found = {name: (float(x.sum), int(x.count)) for name, x in PAPER.metrics(scores).items()}
    assert found == {
        "kl": (2.5, 6),
        "clipped_low": (1.0, 6),
        "clipped_high": (2.0, 6),
    }  # on a bound is not beyond it


SAMPLING = Humanline(sampling=beta(10.0, 10.0, 2.0, 20.0, 2.0, 20.0), seed=3)


def rejecting(rows: int, width: int, step: int = 5, keys: list[str] | None = None):
    random = torch.Generator().manual_seed(0)
    policy = (2 * torch.randn(rows, width, generator=random)).requires_grad_()
    mask, key = (
        torch.ones(rows, width, dtype=torch.bool),
        RejectionKey(step, keys or [f"row {r}" for r in range(rows)]),
    )
    return policy, SAMPLING.scores(policy, torch.zeros(rows, width), mask, key), key


def test_rejected_tokens_keep_their_value_and_lose_their_gradient():
    policy, scores, key = rejecting(8, 50)
    assert torch.equal(scores.log_ratio, policy)
    gradient = torch.autograd.grad(scores.log_ratio.sum(), policy)[0]
    assert set(gradient.unique().tolist()) == {0.0, 1.0}
    found = SAMPLING.metrics(scores, key)
    assert set(found) == {"kl", "rejected"}
    assert float(found["rejected"].sum) == int((gradient == 0).sum()) and int(found["rejected"].count) == 400


def test_the_draw_is_the_rows_own():
    """However the batch is cut and however wide it is padded; another at every step and for every seed."""
    policy, whole, _ = rejecting(6, 40)
    passed = torch.autograd.grad(whole.log_ratio.sum(), policy)[0] > 0
    for rows, width in ([4, 1], 40), ([2], 17):
        part = policy.detach()[rows, :width].requires_grad_()
        mask = torch.ones(len(rows), width, dtype=torch.bool)
        scores = SAMPLING.scores(
            part, torch.zeros_like(part), mask, RejectionKey(5, [f"row {r}" for r in rows])
        )
        assert torch.equal(torch.autograd.grad(scores.log_ratio.sum(), part)[0] > 0, passed[rows, :width])
    again, other, _ = rejecting(6, 40, step=6)
    assert not torch.equal(torch.autograd.grad(other.log_ratio.sum(), again)[0] > 0, passed)


def shrunk(log_ratio: torch.Tensor, *, by: float) -> torch.Tensor:
    return log_ratio / by


def test_a_rule_of_ones_own_takes_the_place_of_clipping():
    named = {"_target_": f"{__name__}.shrunk"}
    policy, scores = scored([-8.0, 0.0, 2.0], Humanline(rule=rule_of(named | {"by": 4})))
    assert scores.log_ratio.tolist() == [[-2.0, 0.0, 0.5]]
    assert torch.autograd.grad(scores.log_ratio.sum(), policy)[0].tolist() == [[0.25] * 3]
    told = Humanline(rule=rule_of(named | {"by": 4})).metrics(scores)
    assert set(told) == {"kl", "changed"} and (told["changed"].sum, told["changed"].count) == (2, 3)
    for wrong in (named, named | {"by": 4, "width": 1}, {"_target_": "math.fsum"}):
        with pytest.raises(ConfigError, match="humanline_rule"):
            rule_of(wrong)
