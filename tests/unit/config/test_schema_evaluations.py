"""Named evaluation sets: what may be said of one, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
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


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["evaluations.a-b.path=x"], r"evaluations\.a-b=a-b: .*letters, digits and _"),
        (["evaluations={9a: {path: x}}"], r"evaluations\.9a=9a: .*begins with a letter"),
        (["evaluations.reward.path=x"], r"evaluations\.reward=reward: .*eval_reward_chosen"),
        (["evaluations.loss.path=x"], r"evaluations\.loss=loss: .*eval_loss"),
        (["evaluations.kl.path=x"], r"evaluations\.kl=kl: .*eval_kl_initial"),
        (
            ["evaluations.hard.verifer=x"],
            r"evaluations\.hard\.verifer=x: .* did you mean evaluations\.hard\.verifier\?",
        ),
        (["evaluations.hard=hh"], r"evaluations\.hard=hh: is a mapping, as in evaluations\.hard\.path="),
        (["evaluations.hard={}"], r"evaluations\.hard=\{\}: is a mapping"),
        (["evaluations.hard.path=null"], r"names the run's own held-out rows; give path"),
        (["evaluations.hard.split=test"], r"evaluations\.hard\.split=test: data=adder has no splits"),
        (["evaluations.hard={path: x, columns: y}"], r"columns=y: .* are path, split, verifier"),
        (["evaluations.hard={path: [x]}"], r"evaluations\.hard\.path=\['x'\]"),
        (["evaluations=null"], r"evaluations=None: is a mapping"),
        (["keep_best=eval_hard_loss"], r"keep_best=eval_hard_loss: use one of"),
        (
            ["evaluations.hard.path=x", "keep_best=eval_hard_drift"],
            r"eval_hard_loss, eval_hard_rew",
        ),
    ],
)
def test_what_is_no_set_is_refused_with_key_and_remedy(words: list[str], message: str):
    with pytest.raises(ConfigError, match=message):
        compose(*words)


NAMES = st.from_regex(r"[A-Za-z][A-Za-z0-9_]{0,12}", fullmatch=True)


@settings(max_examples=50)
@given(NAMES, st.sampled_from(MEASURED))
def test_a_name_and_a_measure_are_told_from_their_key(name: str, measure: str):
    try:
        evaluation_sets({name: {"path": "x"}}, make_config().data)
    except ConfigError:
        return
    assert named_measure(f"eval_{name}_{measure}") == (name, measure)
