"""Named evaluation sets: what may be said of one, and what is refused."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import ConfigError
from config.cli import compose
from config.schema_data import MEASURED, evaluation_sets, named_measure
from tests.tiny import make_config


def sets(*words: str):
    config, _ = compose(*words)
    return evaluation_sets(config.evaluations, config.data)


def test_a_set_differs_from_the_runs_own_data():
    found = sets(
        "evaluations.hard.path=hard.jsonl",
        "--evaluations.other.verifier",
        "data.adder.sums",
        "evaluations.theirs={path: org/name, split: test}",
    )
    assert list(found) == ["hard", "other", "theirs"]
    hard = found["hard"]
    assert (hard.source, hard.path, hard.eval_path) == ("data.sources.local", "hard.jsonl", "hard.jsonl")
    assert hard.verifier == "data.adder.accuracy", "as the run's own data"
    assert found["other"] == replace(make_config().data, verifier="data.adder.sums")
    theirs = found["theirs"]
    assert (theirs.path, theirs.eval_path, theirs.eval_split) == ("org/name", None, "test")


NAMES = st.from_regex(r"[A-Za-z][A-Za-z0-9_]{0,12}", fullmatch=True)


@settings(max_examples=50)
@given(NAMES, st.sampled_from(MEASURED))
def test_a_name_and_a_measure_are_told_from_their_key(name: str, measure: str):
    try:
        evaluation_sets({name: {"path": "x"}}, make_config().data)
    except ConfigError:
        return
    assert named_measure(f"eval_{name}_{measure}") == (name, measure)
