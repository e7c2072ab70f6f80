"""The curves of Figure 2: what is drawn for tokens like the policy's own, for likelier and for rarer ones."""

from __future__ import annotations

import numpy as np
import pytest

from common.errors import ConfigError
from reports.prospect import GAINS
from tools.prospect_figure import cumulative, draw, of_run, perceived

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


def test_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="is not the folder of a run"):
        of_run(tmp_path, 8)
