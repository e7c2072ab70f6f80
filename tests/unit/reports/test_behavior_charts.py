"""The figures of samples that another policy wrote."""

from __future__ import annotations

import numpy as np
import pytest

from reports.behavior_charts import behavior_charts, figure, total
from reports.charts import svg


def bins(*rows: list[float]) -> list[list[float]]:
    return [list(row) for row in rows]


#        tokens known kl ratio ratio² weight weight² masked
TWO = bins([10, 8, 0.8, 8.0, 16.0, 12, 24.0, 2], [20, 20, 4.0, 20.0, 25.0, 20, 20.0, 0])
ONE = bins([10, 8, 0.8, 8.0, 16.0, 12, 24.0, 4])


def test_intervals_add_up_whatever_their_lengths():
    sums = total([ONE, TWO])
    assert sums["known"].tolist() == [16, 20] and sums["masked"].tolist() == [6, 0]
    assert total([])["known"].tolist() == []


def test_what_is_drawn_is_kl_and_sample_sizes_by_bin():
    made = figure("t", "ages", total([TWO]))
    left, right = made.axes
    assert left.lines[0].get_ydata() == pytest.approx([0.1, 0.2])
    policy, correction, masked = right.lines
    assert policy.get_ydata() == pytest.approx([64 / (8 * 16), 400 / (20 * 25)])
    assert correction.get_ydata() == pytest.approx([144 / (10 * 24), 1.0])
    assert masked.get_ydata() == pytest.approx([0.2, 0.0])
    assert [label.get_text() for label in left.get_xticklabels()] == ["0", "1"]
    svg(made)


def test_without_a_correction_its_curves_are_left_out():
    plain = np.array(TWO)
    plain[:, 5] = plain[:, 6] = plain[:, 0]
    assert len(figure("t", "positions", total([plain.tolist()])).axes[1].lines) == 1


def test_a_figure_for_each_thing_that_is_known():
    lines = [{"behavior": {"positions": TWO, "ages": ONE}}, {}]
    assert [title for title, _ in behavior_charts(lines)] == [
        "Samples and policy, by position",
        "Samples and policy, by staleness",
    ]
    foreign = [{"behavior": {"positions": TWO, "ages": []}}]  # a file of samples: nobody knows how old
    assert [title for title, _ in behavior_charts(foreign)] == ["Samples and policy, by position"]
    assert behavior_charts([{}]) == []
