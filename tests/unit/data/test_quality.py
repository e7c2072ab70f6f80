"""The data report: what it counts, its quartiles, and the gate of Figure 6."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import ConfigError, StoppedError
from data.examples import Examples
from data.quality import DataReport, places, select
from data.rows import Dropped, Loaded
from data.types import Completion, Example, Group, Prompt, Sequence, Turn
from reports import data_tables
from tests.tiny import make_config


def group(question: str) -> Group:
    return Group(Prompt((Turn("user", question),)), (Completion("a"), Completion("b")), (1.0, -1.0))


def row(prompt: int, completion: int) -> Sequence:
    return Sequence(np.zeros(prompt, dtype=np.int32), np.ones(completion, dtype=np.int32))


@pytest.fixture
def report() -> DataReport:
    whys = (2, "a tie"), (5, "a tie"), (4, "no | column\n'x'")
    dropped = [Dropped("f.jsonl", n, why) for n, why in whys]
    loaded = Loaded([group("q1"), group("q2"), group("q2")], 6, dropped, "f.jsonl")
    evaluation = Loaded([group("q2"), group("q9")], 2, [], "g.jsonl")
    rows = (row(3, 5), row(3, 7)), (row(9, 1), row(9, 2))
    examples = Examples(tuple((Example("a", two),) for two in rows), {"no completion token": 1})
    return DataReport.of(loaded, evaluation, examples, {"completion end": 1, "oldest turns": 0})


def test_it_counts_rows_prompts_and_what_both_splits_share(report: DataReport) -> None:
    counts = report.read, report.groups, report.prompts, report.examples, report.shared_prompts
    assert counts == (6, 3, 2, 2, 1)
    assert report.dropped == {"a tie": 2, "no | column\n'x'": 1} and report.cut == {"completion end": 1}
    tokens = report.prompt_tokens
    assert (tokens.count, tokens.mean, tokens.maximum) == (4, 6.0, 9.0)
    assert report.completion_tokens.median == 3.5
    assert any("both trained on and evaluated" in warning for warning in report.warnings())
    assert any("left out: 3 of 6 rows (2 × a tie" in line for line in report.beginning())
    empty = report.with_logprobs({"chosen": np.array([np.nan])})
    assert empty.logprob == {} and empty.poor_share is report.with_logprobs({}).poor_share is None


def test_desirable_answers_are_counted_for_a_loss_that_learns_from_them() -> None:
    none = Loaded([], 0, [], "")
    examples = Examples(tuple((Example("a", (row(3, 5),), label),) for label in (-1.0, 1.0, 1.0)), {})
    found = [DataReport.of(none, none, examples, {}, labelled=labelled) for labelled in (True, False)]
    assert [(of.labels, of.desirable_first) for of in found] == [((2, 1), False), (None, False)]


def test_what_the_data_say_does_nothing_on_the_page() -> None:
    hostile = "<svg onload=alert(1)> ![](http://x) `a` \\| <script>\n# b\n\x1b[2J\ud800"
    loaded = Loaded([group("q1")], 3, [Dropped(hostile, 2, hostile)], hostile)
    made = DataReport.of(loaded, Loaded([], 0, [], hostile), Examples((), {hostile: 1}), {})
    page = data_tables.page(made.to_dict())
    page.encode()
    assert [part for part in ("<svg", "<script", "](", "`", "\n# b", "\x1b") if part in page] == []
    assert page.count("&lt;svg onload=alert(1)&gt;") == 6


def test_the_gate_warns_of_data_like_the_papers_lowest_quarter(report: DataReport) -> None:
    """Where the model answered itself, its answers are the measure."""
    for center, warned in ((-0.7, True), (-0.36, True), (-0.30, False), (-2.0, True), (-0.05, False)):
        chosen = np.array([center, center - 0.01, center + 0.01, np.nan])
        scored = report.with_logprobs({"chosen": chosen, "rejected": chosen - 0.02})
        assert any("Figure 6" in warning for warning in scored.warnings()) == warned
        assert scored.logprob["all"].count == 6  # what was not scored is not averaged over
        assert scored.logprob["chosen"].median == pytest.approx(center)
    human = np.linspace(-2.5, -1.5, 20)
    own = [-1.2 - 0.1 * i for i in range(11)]  # a tenth of these is below -2.1
    likely = report.with_logprobs({"chosen": human}, own=own)
    assert likely.poor_share == pytest.approx(0.4) and not any("Figure 6" in one for one in likely.warnings())
    unlikely = report.with_logprobs({"chosen": human - 1}, own=own)
    assert any("its own answers -1.70" in one for one in unlikely.warnings())


# data.logprob_range: a slice of the order by likelihood, and ranges that meet part the data

ROUNDED = st.floats(-20, 0).map(lambda v: round(v, 1))  # equal ones happen


@given(st.lists(ROUNDED, min_size=4, max_size=60).map(np.array), st.floats(0, 1), st.floats(0, 1))
def test_what_is_kept_is_a_slice_of_the_order_by_likelihood(values, a, b) -> None:
    """Ranges that meet part the groups."""
    ends = [0.0, *sorted((a, b)), 1.0]
    parts = [range(*places(len(values), (low, high))) for low, high in pairwise(ends)]
    assert [place for part in parts for place in part] == list(range(len(values)))
    low, high = select(values, [0.0, 0.25]), select(values, [0.25, 1.0])
    assert sorted(low.kept + high.kept) == list(range(len(values)))
    assert list(low.kept) == sorted(low.kept) and list(high.kept) == sorted(high.kept)
    assert values[list(low.kept)].max() <= values[list(high.kept)].min()
    assert (low.below, low.above, high.below) == (0, len(high.kept), len(low.kept))
    assert low.lowest == low.all.minimum == values.min() and low.highest == values[list(low.kept)].max()
    assert abs(len(low.kept) - len(values) / 4) <= 0.5


def test_a_selection_is_refused_where_it_means_nothing() -> None:
    for bad in (float("nan"), float("-inf")):
        with pytest.raises(StoppedError, match="1 of 3 training groups"):
            select(np.array([-1.0, bad, -0.1]), [0.0, 0.5])
    with pytest.raises(ConfigError, match=r"^data\.logprob_range=.*0 <= low < high <= 1"):
        make_config("data.logprob_range=[0.6,0.5]")
    for nothing in (("online=true", "loss=dpo"), ("loss=bradley_terry",)):
        with pytest.raises(ConfigError, match=r"^data\.logprob_range="):
            make_config(*nothing, "data.logprob_range=[0,0.5]")
