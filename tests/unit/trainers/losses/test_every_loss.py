"""What must hold for every loss, whichever it is: each yaml of config/loss is found and put through the same
tests, and so is each shape of GRPO's."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.trainers.losses.family import FILES, RANGE, Batch, load, random_batch
from trainers.humanline import Humanline
from trainers.losses.base import TokenScores
from trainers.losses.shapes import SHAPES

SHAPED = [load(path, shape) for path in FILES if path.stem == "grpo" for shape in SHAPES if shape != "ppo"]
LOSSES = [load(path) for path in FILES] + SHAPED
BESIDE_THE_RATIO = ("cispo", "reinforce")
"""Shapes whose gradient goes through log pi_theta itself."""
every_loss = pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.name)
with_reference = pytest.mark.parametrize(
    "loss",
    [x for x in LOSSES if x.reference and x.numbers.get("shape") not in BESIDE_THE_RATIO],
    ids=lambda loss: loss.name,
)
GARBAGE = (math.inf, -math.inf, math.nan, 1e30, -1e30)
CUTS = [Humanline(), RANGE]


def same(a, b, tolerance=1e-9):
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def means(result):
    return {
        f"{name} {half}": float(value)
        for name, x in result.metrics.items()
        for half, value in x._asdict().items()
    }


@every_loss
@pytest.mark.parametrize("humanline", CUTS, ids=["off", "on"])
def test_finite_where_policy_and_reference_are_equal(loss, humanline):
    batch = random_batch(spread=0.0)
    result, gradient = batch.run(loss, humanline)
    assert torch.isfinite(result.total) and torch.isfinite(gradient).all()
    assert gradient[batch.mask].any(), "nothing would ever be learned from the first step"
    assert not gradient[~batch.mask].any()


@every_loss
@pytest.mark.parametrize("humanline", CUTS, ids=["off", "on"])
def test_padding_changes_nothing(loss, humanline):
    """More masked columns and more rows without a token, whatever lies in them: labels and log-probabilities
    alike."""
    batch = random_batch()
    half, width = len(batch.labels) // 2, batch.mask.shape[1]

    def padded(x, fill):
        wide = torch.cat([x, torch.full((len(x), 3), fill, dtype=x.dtype)], dim=1)
        empty = torch.full((2, width + 3), fill, dtype=x.dtype)
        return torch.cat([wide[:half], empty, wide[half:], empty])

    mask, (expected, gradient) = padded(batch.mask, False), batch.run(loss, humanline)
    for bad in GARBAGE:
        bads = torch.full((2,), bad)
        labels = torch.cat([batch.labels[:half], bads, batch.labels[half:], bads])
        policy, reference = padded(batch.policy, bad), padded(batch.reference, -bad)
        policy, reference = policy.masked_fill(~mask, bad), reference.masked_fill(~mask, -bad)
        found, padded_gradient = Batch(policy, reference, mask, labels).run(loss, humanline)
        same(found.total, expected.total)
        same(padded_gradient[mask], gradient[batch.mask])
        assert not padded_gradient[~mask].any(), "gradient off the mask"
        assert means(found) == pytest.approx(means(expected))


@every_loss
def test_a_batch_without_a_token_adds_nothing(loss):
    batch = random_batch()
    batch.mask = torch.zeros_like(batch.mask)
    result, gradient = batch.run(loss)
    assert result.total == 0 and not gradient.any()
    assert all(x.sum == 0 and x.count == 0 for x in result.metrics.values())


@every_loss
@settings(max_examples=15)
@given(
    seed=st.integers(0, 10_000), cuts=st.sets(st.integers(1, 5), max_size=3), humanline=st.sampled_from(CUTS)
)
def test_the_parts_of_a_batch_add_up_to_it(loss, seed, cuts, humanline):
    batch = random_batch(pairs=6, seed=seed)
    whole, gradient = batch.run(loss, humanline)
    edges = [0, *sorted(cuts), 6]
    pieces = [slice(a, b) for a, b in pairwise(edges)]
    parts = [batch.take(piece).run(loss, humanline) for piece in pieces]
    same(sum(part.total for part, _ in parts), whole.total)
    for piece, (_, part_gradient) in zip(pieces, parts, strict=True):
        same(part_gradient, torch.cat([gradient[:6][piece], gradient[6:][piece]]))
    for name, value in whole.metrics.items():
        same(sum(part.metrics[name].sum for part, _ in parts), value.sum)
        assert sum(int(part.metrics[name].count) for part, _ in parts) == int(value.count)


@with_reference
@settings(max_examples=15)
@given(seed=st.integers(0, 10_000), spread=st.sampled_from([2.0, 10.0, 80.0]))
def test_no_gradient_passes_outside_the_clip_range(loss, seed, spread):
    """Through the log-ratios, that is: a KL term that reads the raw log-probabilities is held still."""
    batch = random_batch(seed=seed, spread=spread)
    leaf = batch.policy.clone().requires_grad_()
    raw = batch.policy - batch.reference
    scores = TokenScores(batch.policy, batch.reference, RANGE.clip(leaf - batch.reference), batch.mask)
    gradient = torch.autograd.grad(loss(scores, batch.labels).total, leaf)[0]
    outside = (raw < -1.5) | (raw > 1.5)
    assert not gradient[outside].any()
    assert torch.isfinite(gradient).all()


@with_reference
def test_a_loss_with_a_reference_learns_inside_the_clip_range_and_reads_the_clipped_log_ratio(loss):
    batch = random_batch(spread=1.0)
    _, gradient = batch.run(loss, RANGE)
    assert gradient[batch.mask].any()
    still = TokenScores(batch.policy, batch.reference, torch.zeros_like(batch.policy), batch.mask)
    assert not torch.equal(loss(still, batch.labels).total, batch.run(loss)[0].total)


@pytest.mark.parametrize("loss", [x for x in LOSSES if not x.reference], ids=lambda loss: loss.name)
def test_a_loss_without_a_reference_does_not_read_one(loss):
    batch = random_batch()
    other = Batch(batch.policy, batch.reference * float("nan"), batch.mask, batch.labels)
    (found, gradient), (wanted, expected) = other.run(loss), batch.run(loss)
    same(found.total, wanted.total)
    same(gradient, expected)


@every_loss
def test_only_the_mask_says_which_token_counts(loss):
    """A token that policy and reference agree on exactly (log-ratio 0) is a token like any other."""
    batch = random_batch(spread=0.0)
    longer = Batch(batch.policy, batch.reference, torch.ones_like(batch.mask), batch.labels)
    _, gradient = longer.run(loss)
    moved = gradient != 0
    assert moved.any()
    assert torch.equal(moved.all(dim=1), moved.any(dim=1)), "some tokens of a row were passed over"


@every_loss
def test_metrics_are_sums_and_counts_without_gradient(loss):
    result, _ = random_batch().run(loss)
    for name, value in result.metrics.items():
        assert value.sum.shape == value.count.shape == (), name
        assert not value.sum.requires_grad, name
    if loss.trainer not in ("sft", "csft"):
        assert {"reward_chosen", "reward_rejected", "reward_accuracy"} <= set(result.metrics)
    assert "reward_margin" not in result.metrics, "the trainer makes it of the other two"
