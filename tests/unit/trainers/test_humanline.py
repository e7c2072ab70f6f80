"""Humanline: the clip and its gradient, exactness when off, the fractions logged, and when the reference is synced."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainers.humanline import OFF, Humanline

PAPER = Humanline(-1.5, 1.5, 1)


def scored(log_ratios, humanline, mask=None):
    policy = torch.tensor([log_ratios], requires_grad=True)
    mask = torch.ones(1, len(log_ratios), dtype=torch.bool) if mask is None else torch.tensor([mask])
    return policy, humanline.scores(policy, torch.zeros_like(policy.detach()), mask)


def test_clipping_clamps_in_log_space_and_stops_the_gradient_outside():
    policy, scores = scored([-80.0, -1.6, -1.4, 0.0, 1.4, 1.6, 80.0], PAPER)
    assert scores.log_ratio.tolist() == [[-1.5, -1.5, pytest.approx(-1.4), 0.0, pytest.approx(1.4), 1.5, 1.5]]
    gradient = torch.autograd.grad(scores.log_ratio.sum(), policy)[0]
    assert gradient.tolist() == [[0.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0]]


def test_the_two_bounds_are_not_one():
    _, scores = scored([-3.0, 3.0], Humanline(-0.5, 2.0, 1))
    assert scores.log_ratio.tolist() == [[-0.5, 2.0]]


@given(st.lists(st.tuples(st.floats(-1e4, 0, width=32), st.floats(-1e4, 0, width=32)), min_size=1, max_size=20))
def test_off_is_the_plain_difference_bit_for_bit(values):
    policy, reference = (torch.tensor([[v[i] for v in values]]) for i in (0, 1))
    policy.requires_grad_()
    scores = OFF.scores(policy, reference, torch.ones(1, len(values), dtype=torch.bool))
    assert torch.equal(scores.log_ratio, policy - reference)
    assert torch.equal(torch.autograd.grad(scores.log_ratio.sum(), policy)[0], torch.ones_like(policy))


def test_scores_keep_the_raw_log_probabilities():
    policy, scores = scored([-9.0, 9.0], PAPER)
    assert scores.policy is policy
    assert not scores.reference.any()


def test_the_fractions_are_over_the_mask_and_of_the_raw_log_ratios():
    _, scores = scored([-2.0, 2.0, 2.5, 1.5, -1.5, 0.0, -99.0, math.nan], PAPER, mask=[True] * 6 + [False] * 2)
    found = {name: (float(x.sum), int(x.count)) for name, x in PAPER.metrics(scores).items()}
    assert found == {"kl": (2.5, 6), "clipped_low": (1.0, 6), "clipped_high": (2.0, 6)}  # on a bound is not beyond it


def test_off_clips_nothing():
    _, scores = scored([-99.0, 99.0], OFF)
    found = OFF.metrics(scores)
    assert float(found["clipped_low"].sum) == float(found["clipped_high"].sum) == 0.0


REFERENCE_OF = {1: [0, 0, 1, 2, 3, 4, 5, 6, 7], 2: [0, 0, 0, 2, 2, 4, 4, 6, 6], 4: [0, 0, 0, 0, 0, 4, 4, 4, 4], None: [0] * 9}
"""sync_freq -> the step whose policy is the reference in the loss of steps 0, 1, 2, ...: the table of paper C.2.1's listing."""


@pytest.mark.parametrize("k", REFERENCE_OF)
def test_the_reference_follows_the_policy_one_step_behind(k):
    humanline, reference, seen = Humanline(sync_freq=k), 0, []
    for step in range(9):
        seen.append(reference)
        if humanline.due(step):
            reference = step  # before the optimizer step: still the policy that this step's loss saw
    assert seen == REFERENCE_OF[k]


@pytest.mark.parametrize("k", REFERENCE_OF)
def test_after_the_step_is_another_table(k):
    """What trust-region syncing would give: at k = 1 policy and reference are equal in every loss."""
    humanline, reference, seen = Humanline(sync_freq=k), 0, []
    for step in range(9):
        seen.append(reference)
        reference = step + 1 if humanline.due(step) else reference
    assert (seen == REFERENCE_OF[k]) is (k is None)
    if k == 1:
        assert seen == list(range(9))


@pytest.mark.parametrize("k", REFERENCE_OF)
def test_the_horizon_is_every_step_with_the_same_reference(k):
    """last_step_before_sync(t) is the last step whose reference is that of step t, so scores made at a sync last to the next."""
    humanline, steps = Humanline(sync_freq=k), 40
    reference = [0] * (steps + 1)
    for step in range(steps):
        reference[step + 1] = step if humanline.due(step) else reference[step]
    for step in range(1, steps // 2):
        last = humanline.last_step_before_sync(step)
        if k is None:
            assert last == math.inf
            continue
        assert humanline.due(int(last))
        assert len(set(reference[step : int(last) + 1])) == 1
        assert reference[int(last) + 1] != reference[step]
