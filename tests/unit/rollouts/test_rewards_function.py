"""Rewards by a user's function: what it may return, and everything it may do wrong. None of it is ever a
silent 0."""

from __future__ import annotations

import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import ConfigError
from config.schema_rewards import FunctionConfig
from data.adder import addition, rewards
from data.formats import prompt_only
from data.groups import from_dict, read_groups, to_dict, write_groups
from data.json_values import LARGEST
from data.rows import Row
from data.types import Completion, Group, Prompt, Turn
from rollouts.rewards.base import Missing, Reward, RewardError, make_reward
from rollouts.rewards.function import columns
from rollouts.rewards.pool import Pool
from tests.tiny import make_config, reward_of
from tests.unit.rollouts import reward_functions

HERE = "tests.unit.rollouts.reward_functions"


def prompt(text="q", reference=None):
    return Prompt((Turn("system", "s"), Turn("user", text)), reference)


def function(name, max_missing=0.0, **settings):
    return reward_of("function", FunctionConfig(path=f"{HERE}.{name}", **settings), max_missing)


@pytest.fixture
def make():
    made = []

    def _make(config):
        made.append(make_reward(config))
        return made[-1]

    yield _make
    for reward in made:
        reward.close()


@pytest.fixture(scope="module")
def by_word():
    reward = make_reward(function("by_word", batch_size=2, timeout=1.0))
    yield reward
    reward.close()


@pytest.mark.parametrize(
    ("name", "conversational"),
    [
        ("lengths", True),
        ("plain_lengths", False),
        ("slow_lengths", True),
        ("as_array", True),
        ("plain_lengths", None),
        ("lengths", None),  # which takes a field of what it gets
    ],
)
def test_order_and_values_survive_batching(make, name, conversational):
    texts = ["x" * n for n in (3, 1, 4, 1, 5, 9, 2)]
    reward = make(function(name, batch_size=3, workers=2, conversational=conversational))
    assert reward.score([prompt()] * 7, texts) == [3, 1, 4, 1, 5, 9, 2]
    assert reward.metrics["missing"] == 0 and reward.score([], []) == []


def test_a_rows_own_column_goes_before_the_reference_answer_of_its_name():
    ask = [replace(prompt("a", "7"), columns=json.dumps({"solution": "3 + 4"})), prompt("b", "8")]
    given = columns(ask, ["x", "y"], conversational=False)
    assert given["solution"] == ["3 + 4", None] and given["answer"] == given["reference"] == ["7", "8"]


def test_the_other_columns_of_a_row_go_by_their_names_and_the_first_call_is_shown(make, capsys, tmp_path):
    """From the rows, by way of a file of samples."""
    rows = [{"prompt": f"q{i}", "difficulty": i, "tags": ["a"] * 3, "x": float("nan")} for i in (1, 2)]
    config = make_config("data=local", "data.path=x.jsonl", "data.eval_fraction=0").data
    made = list(prompt_only([Row("x", i, row) for i, row in enumerate(rows)], config))
    write_groups(tmp_path / "groups.jsonl", made)
    assert read_groups(tmp_path / "groups.jsonl") == made
    reward, prompts = make(function("sees_others")), [group.prompt for group in made]
    reward.check_prompts(prompts)
    assert reward.score(prompts, ["one", "two"]) == [3, 6] == reward.score(prompts, ["one", "two"])
    said = capsys.readouterr().out
    assert said.count("gets texts (reward.function.conversational=false); its first call") == 1
    assert "completions=['one', …]" in said and "difficulty=[1, …]" in said and "x=[None, …]" in said


@pytest.mark.parametrize(
    ("name", "columns", "said"),
    [
        ("sees_columns", {"answer": "7"}, r"asks for reference.*type data\.columns=\{reference: answer\}"),
        ("sees_answers", {"solution": "7"}, r"asks for answer.*type data\.columns=\{reference: solution\}"),
        ("sees_columns", {}, r"asks for reference.*name its column"),
        ("sees_others", {"tags": "x", "difficulty": None}, "asks for difficulty, and no row has such"),
    ],
)
def test_a_column_that_no_row_has_is_refused_before_training(make, name, columns, said):
    ask = [replace(prompt(), columns=json.dumps(columns) if columns else "")] * 2
    with pytest.raises(ConfigError, match=said):
        make(function(name)).check_prompts(ask)


def test_a_reward_beyond_float32_is_no_verdict(make):
    """So that no file of groups holds what cannot be read again."""
    reward = make(function("beyond", 0.5, batch_size=1))
    found = reward.score([prompt()] * 4, ["1e39", "-3.5e38", "3.4e38", "7"])
    assert found == [None, None, 3.4e38, 7]
    group = Group(prompt(), tuple(map(Completion, "ab")), tuple(v for v in found if v is not None))
    assert from_dict(to_dict(group)).rewards == group.rewards


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("raise", "ValueError: the reward is broken"),
        ("hang", "took longer than 1 s"),
        ("exit", "ended its process"),
        ("die", r"ended its process \(about to die\)"),
        ("none", "no verdict"),
        ("nan", "the reward is nan"),
        ("short", "returned 1 rewards for 2 completions"),
        ("string", "returned a str, not a list"),
        ("dict", "returned a dict"),
        ("number", "returned a float, not a list"),
        ("lambda", "returned a function, not a number"),
    ],
)
def test_misbehaviour_is_no_verdict_with_its_reason_and_the_next_batch_is_scored(by_word, word, reason):
    reward = by_word
    reward.max_missing = 0.5
    start = time.monotonic()
    assert reward.score([prompt()] * 4, [word, "a", "fine", "b"]) == [None, None, 1.0, 1.0]
    assert reward.metrics["missing"] == 0.5
    assert time.monotonic() - start < 40  # it hangs for 60
    reward.max_missing = 0.49
    with pytest.raises(RewardError, match=reason) as error:
        reward.score([prompt()] * 4, [word, "a", "fine", "b"])
    assert "2 of 4" in str(error.value)
    assert "reward.max_missing=0.49" in str(error.value)


def test_a_worker_that_dies_while_it_loads_gives_its_log_back(tmp_path):
    marker = tmp_path / "loads"
    pool = Pool(f"{HERE}.dying_once", marker, workers=1, timeout=5.0, log_dir=tmp_path / "logs")
    with pytest.raises(RewardError, match="did not start"):
        pool.map([1])
    assert pool.map([1, 2]) == [1, 2]
    pool.close()
    assert [path.name for path in (tmp_path / "logs").iterdir()] == ["reward-0.log"]


def test_what_a_function_raises_names_its_line_and_is_in_the_log_whole_with_what_it_printed(
    tmp_path, monkeypatch
):
    logs, temporary = tmp_path / "run" / "logs", tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr(tempfile, "tempdir", None)
    reward = make_reward(function("talks", batch_size=1, conversational=True), log_dir=logs)
    assert not logs.exists()  # a run that is refused leaves nothing
    assert reward.score([prompt()] * 2, ["[1]", "[1, 2]"]) == [1, 2]
    with pytest.raises(RewardError) as error:
        reward.score([prompt()] * 5, ["[1]", *["oh\nno"] * 4])
    lines = Path(reward_functions.__file__).read_text().splitlines()
    number = next(i for i, line in enumerate(lines, 1) if "json.loads" in line)
    where = f"tests/unit/rollouts/reward_functions.py:{number}"
    assert f"4 x JSONDecodeError: Expecting value: line 1 column 1 (char 0) ({where})" in str(error.value)
    assert f"in full: {logs}/reward-*.log" in str(error.value)
    reward.close()
    assert [path.name for path in logs.iterdir()] == ["reward-0.log"]
    said = (logs / "reward-0.log").read_text()
    assert said.count("scoring 1") == 7
    assert said.count("Traceback") == 3  # of one failure no more
    assert f'reward_functions.py", line {number}, in talks' in said
    assert tempfile.gettempdir() == str(temporary) and not list(temporary.iterdir())


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("x = 1\nraise RuntimeError('not\\ntoday')\n", r"RuntimeError: not today \(.*faulty\.py:2\)"),
        ("import json\nimport no_such_thing\n", r"No module named 'no_such_thing'.*\(.*faulty\.py:2\)"),
        ("x = 1\ndef f(:\n", r"SyntaxError: .*\(faulty\.py, line 2\)"),
        ("f = 1\n", "is not a function"),
        ("g = 1\n", "has no attribute|cannot import"),
    ],
)
def test_a_function_that_cannot_be_imported_is_refused_with_its_line(tmp_path, monkeypatch, text, told):
    (tmp_path / "faulty.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    config = reward_of("function", FunctionConfig(path="faulty.f"))
    with pytest.raises(ConfigError, match=told):
        make_reward(config, log_dir=tmp_path / "logs")
    assert not (tmp_path / "logs").exists()


def test_the_embedded_task(make):
    config = make_config("online=true").reward_config
    assert config.needs_reference
    prompts, texts = [addition(7, 8), addition(12, 9), addition(1, 2)], ["7+8=15;0+0+1=1;15", "nonsense", "3"]
    assert make(config).score(prompts, texts) == rewards(texts, [p.reference_answer for p in prompts])


class Fixed:
    def __init__(self, values):
        self.values, self.metrics, self.log_dir = values, {}, None

    def score(self, prompts, completions):
        return self.values

    def release(self): ...

    def close(self): ...


@given(st.lists(st.one_of(st.floats(), st.just(Missing("why"))), min_size=1), st.floats(0, 1))
def test_a_reward_never_makes_a_number_of_a_missing_verdict(values, cap):
    reward = Reward(Fixed(values), cap)
    bad = [isinstance(v, Missing) or not abs(v) <= LARGEST for v in values]
    ask = [prompt()] * len(values), [""] * len(values)
    if sum(bad) / len(bad) > cap:
        with pytest.raises(RewardError):
            reward.score(*ask)
    else:
        assert [v is None for v in reward.score(*ask)] == bad
