"""Which groups data.logprob_range keeps: a slice of their order by likelihood, and ranges that meet part the
data."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import ConfigError, StoppedError
from data.selection import places, select
from reports import data_tables
from tests.tiny import make_config

VALUES = st.lists(st.floats(-20, 0).map(lambda v: round(v, 1)), min_size=4, max_size=60).map(
    np.array
)  # rounded: equal ones happen


@given(VALUES, st.floats(0, 1), st.floats(0, 1))
def test_ranges_that_meet_part_the_groups(values: np.ndarray, a: float, b: float) -> None:
    ends = [0.0, *sorted((a, b)), 1.0]
    parts = [range(*places(len(values), (low, high))) for low, high in pairwise(ends)]
    assert [place for part in parts for place in part] == list(range(len(values)))


@given(VALUES)
def test_what_is_kept_is_the_slice_of_the_order_and_the_data_keep_theirs(values: np.ndarray) -> None:
    low, high = select(values, [0.0, 0.25]), select(values, [0.25, 1.0])
    assert sorted(low.kept + high.kept) == list(range(len(values)))
    assert list(low.kept) == sorted(low.kept) and list(high.kept) == sorted(high.kept)
    assert values[list(low.kept)].max() <= values[list(high.kept)].min()
    assert (low.below, low.above, high.below) == (0, len(high.kept), len(low.kept))
    assert low.lowest == low.all.minimum == values.min() and low.highest == values[list(low.kept)].max()
    assert abs(len(low.kept) - len(values) / 4) <= 0.5


@given(VALUES, st.randoms())
def test_the_groups_kept_do_not_depend_on_their_order_in_the_file(values: np.ndarray, random) -> None:
    values = values + np.arange(len(values)) * 1e-6  # no ties: there the order in the file decides
    shuffled = list(range(len(values)))
    random.shuffle(shuffled)
    again = select(values[shuffled], [0.25, 0.75])
    assert {shuffled[g] for g in again.kept} == set(select(values, [0.25, 0.75]).kept)


@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_a_group_without_a_finite_value_has_no_place(bad: float) -> None:
    with pytest.raises(StoppedError, match="1 of 3 training groups"):
        select(np.array([-1.0, bad, -0.1]), [0.0, 0.5])


def test_the_report_counts_what_was_left_out_by_reason() -> None:
    page = data_tables.page({"selection": select(np.arange(-8.0, 0.0), [0.25, 0.75]).to_dict()})
    assert "4 of 8 groups; 2 were less likely, 2 more likely" in page
    assert "| every group | 8 | -4.500 | -8.000 |" in page


@pytest.mark.parametrize("bad", ["[0.5,0.5]", "[0.6,0.5]", "[-0.1,0.5]", "[0,1.1]", "[0.25]", "[0,0.5,1]"])
def test_a_range_that_is_none_is_refused(bad: str) -> None:
    with pytest.raises(ConfigError, match=r"^data\.logprob_range=.*0 <= low < high <= 1"):
        make_config(f"data.logprob_range={bad}")


@pytest.mark.parametrize("settings", [("online=true", "loss=dpo"), ("loss=bradley_terry",)])
def test_a_range_is_refused_where_there_is_nothing_to_order(settings: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=r"^data\.logprob_range="):
        make_config(*settings, "data.logprob_range=[0,0.5]")
    make_config(*settings)
