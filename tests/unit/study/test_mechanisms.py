"""A reason is supported, excluded or left open by what the runs measured, whatever it claims itself."""

from __future__ import annotations

from dataclasses import replace

import pytest

from common.errors import ConfigError
from reports.statistics import Mean
from study.claims import GREATER, NOT_RUN, NOT_SEEN, REVERSED, SEEN, Answer, Claim, read_claims
from study.mechanisms import (
    EXCLUDED,
    MEASURES,
    OPEN,
    SUPPORTED,
    check_predictions,
    follows,
    mechanism_sections,
)
from study.plan import TASKS, read_plan
from study.records import Record
from tests.unit.study.test_why import ended

PLAN = read_plan(TASKS["adder"])
CHOSEN = {cell: {"lr": 1e-4, PLAN.then[cell][0]: 2.0} for cell in PLAN.main}
CLAIM = Claim("Better", "Figure 1", "yes", "main", GREATER, (("dpo-offline-hl", "dpo-offline"),), "it moved")


@pytest.mark.parametrize(
    ("said", "value", "outcome"),
    [
        ("lower", -2.0, SUPPORTED),
        ("lower", 2.0, EXCLUDED),
        ("lower", 0.1, OPEN),
        ("higher", 2.0, SUPPORTED),
        ("higher", -2.0, EXCLUDED),
        ("higher", -0.1, OPEN),
        ("below 3", 2.0, SUPPORTED),
        ("below 1", 2.0, EXCLUDED),
        ("below 2.1", 2.0, OPEN),
    ],
)
def test_a_reason_follows_the_side_on_which_the_whole_interval_lies(said, value, outcome):
    assert follows(said, Mean(value, 0.1, 10)) == outcome


def pair(b: float, a: float, *, key: str = "reward_chosen", loss: str = "dpo") -> list[Record]:
    """Runs of three seeds of which ``key`` is b and a after training, with a little of each seed's own."""
    cells = ((f"{loss}-offline-hl", b), (f"{loss}-offline", a))
    return [ended(c, s, **{key: v + s / 100 * (c == cells[0][0])}) for c, v in cells for s in (1, 2, 3)]


def rows(claim: Claim, runs: list[Record], verdict: str = NOT_SEEN, loss: str = "dpo") -> list[list[str]]:
    answer = Answer(claim, f"{loss}-offline-hl", f"{loss}-offline", verdict)
    found = mechanism_sections(PLAN, [answer], runs, CHOSEN)
    return [row[3:] for row in found[0].table[1:]] if found else []


def test_the_measurement_is_paired_by_seed_and_in_nats():
    lower = replace(CLAIM, shown_by={"chosen": "lower"})
    ((reason, predicts, measured, outcome),) = rows(lower, pair(-6.0, 2.0))
    assert reason == "it moved" and predicts == "chosen answers moved, nats a sequence: lower"
    assert measured.startswith("-3.99 [-4.0") and outcome == SUPPORTED, "(-6.02 - 2) / beta 2"
    assert rows(lower, pair(2.0, -6.0), REVERSED)[0][-1] == EXCLUDED
    other_seeds = [replace(run, seed=run.seed + 10 * (run.cell == "dpo-offline")) for run in pair(-6.0, 2.0)]
    assert rows(lower, other_seeds)[0][2:] == ["not measured", OPEN]


def test_a_bound_is_on_b_alone():
    bound = replace(CLAIM, shown_by={"clipped": "below 0.3"})
    runs = pair(0.0, 0.0)  # of which those with humanline clip a quarter
    assert rows(bound, runs)[0][2:] == ["25.000% [25.000%, 25.000%]", SUPPORTED]
    assert rows(replace(CLAIM, shown_by={"clipped": "below 0.2"}), runs)[0][-1] == EXCLUDED


def test_without_a_prediction_a_reason_is_a_guess_and_what_was_seen_needs_none():
    assert rows(CLAIM, pair(1.0, 2.0)) == [["it moved", "–", "–", "a guess"]]
    assert rows(CLAIM, pair(1.0, 2.0), SEEN) == rows(CLAIM, [], NOT_RUN) == []


def test_the_weight_of_an_example_is_that_of_dpo():
    both = replace(CLAIM, shown_by={"weight": "lower", "kl": "lower"})
    assert [row[1].partition(",")[0].partition(":")[0] for row in rows(both, pair(1.0, 2.0))] == [
        "weight of an example",
        "KL from the start",
    ]
    assert len(rows(both, pair(0.1, 0.2, key="kl_initial", loss="kto"), loss="kto")) == 1
    only = replace(CLAIM, shown_by={"weight": "lower"})
    assert rows(only, pair(1.0, 2.0, loss="kto"), loss="kto")[0][-1] == "a guess"


@pytest.mark.parametrize(
    "said", [{"chose": "lower"}, {"chosen": "less"}, {"chosen": "below"}, {"chosen": "below x"}]
)
def test_what_cannot_be_checked_is_refused(said):
    with pytest.raises(ConfigError, match="shown_by"):
        check_predictions([replace(CLAIM, shown_by=said)])


@pytest.mark.parametrize("task", TASKS)
def test_the_reasons_of_the_published_claims_can_be_checked(task):
    claims, *_ = read_claims(TASKS[task].with_name("claims.yaml"))
    check_predictions(claims)
    assert sum(bool(claim.shown_by) for claim in claims) >= 6
    assert {name for claim in claims for name in claim.shown_by} <= set(MEASURES)
