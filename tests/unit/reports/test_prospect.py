"""Prospect theory: the paper's own example, the objective limit, the shapes that the theory promises, and the
curves of Figure 2."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reports.prospect import GAINS, capacity, decision_weights, value
from tools.prospect_figure import cumulative, draw, perceived

objective = partial(capacity, gamma=1.0)


@st.composite
def prospects(draw, low=-100.0, high=100.0):
    n = draw(st.integers(1, 12))
    outcomes = draw(st.lists(st.floats(low, high).map(lambda x: round(x, 3)), min_size=n, max_size=n))
    mass = np.array(draw(st.lists(st.integers(1, 50), min_size=n, max_size=n)), dtype=float)
    return np.array(outcomes), mass / mass.sum()


def test_the_papers_example():
    """+50 with 60 %, +100 with 20 %, -100 with 20 %: perceived 0.8 and 0.3, so weights of 0.5 and 0.3
    (section 3)."""

    def stipulated(a):
        return np.interp(a, [0.0, 0.2, 0.8, 1.0], [0.0, 0.3, 0.8, 1.0])

    weights = decision_weights([50, 100, -100], [0.6, 0.2, 0.2], gains=stipulated, losses=objective)
    np.testing.assert_allclose(weights, [0.5, 0.3, 0.2], atol=1e-15)


@given(prospects(), st.randoms())
def test_gamma_one_gives_the_objective_probabilities_and_order_does_not_matter(prospect, random):
    outcomes, p = prospect
    weights = decision_weights(outcomes, p, gains=objective, losses=objective)
    np.testing.assert_allclose(weights, p, atol=1e-12)
    order = list(range(len(p)))
    random.shuffle(order)
    weights = decision_weights(outcomes, p)[order]
    np.testing.assert_allclose(decision_weights(outcomes[order], p[order]), weights, atol=1e-12)


def test_each_side_has_its_own_gamma_and_what_is_no_prospect_is_refused():
    gains, losses = (partial(capacity, gamma=gamma) for gamma in (0.5, 0.9))
    found = decision_weights([5.0, -5.0], [0.1, 0.9], gains=gains, losses=losses)
    np.testing.assert_allclose(found, [capacity(0.1, 0.5), capacity(0.9, 0.9)])
    values = value([4.0, 1.0, -2.0], lam=2.0, alpha=0.5, z0=1.0)
    np.testing.assert_allclose(values, [3**0.5, 0.0, -2 * 3**0.5])
    for outcomes, p in (([1.0], [0.5]), ([1.0, 2.0], [1.5, -0.5]), ([1.0, 2.0], [1.0])):
        with pytest.raises(ValueError, match="sum 1"):
            decision_weights(outcomes, p)
    with pytest.raises(ValueError, match="gamma"):
        capacity(0.5, 0.0)


RANDOM = np.random.default_rng(0)
OWN = RANDOM.normal(size=2000)


def line(figure, label):
    return next(curve for curve in figure.axes[0].lines if curve.get_label() == label).get_ydata()


def test_the_policys_own_tokens_are_the_diagonal_and_perception_an_inverted_s():
    """Of gains alone it is the capacity function of doing as well or better (equation 4): what is left above
    a surprisal is the capacity of its objective share."""
    at = np.sort(OWN)
    across, up = cumulative(OWN, at), perceived(OWN, at)
    np.testing.assert_allclose(across, np.arange(1, 2001) / 2000)
    assert (np.diff(up) > 0).all() and up[-1] == pytest.approx(1)
    assert up[100] > across[100] and up[-100] < across[-100], (
        "extremes of either side weigh more than they are likely"
    )
    gains = np.abs(OWN)
    at = np.sort(gains)[:-1]
    np.testing.assert_allclose(1 - perceived(gains, at), GAINS(1 - cumulative(gains, at)), atol=1e-9)


def test_worse_data_saturate_sooner_and_better_later():
    figure = draw(OWN, {"better": OWN + 1, "worse": OWN - 1}, (-1.5, 1.5))
    own, better, worse = (
        line(figure, name)
        for name in ("sampled from the policy", "training data, better", "training data, worse")
    )
    assert (worse >= own).all() and (better <= own).all() and worse[1000] > 0.8 > 0.2 > better[1000]
    assert any("humanline range" in str(curve.get_label()) for curve in figure.axes[0].lines)
