"""Rewards by a user's function: what it may return, and everything it may do wrong. None of it is ever a
silent 0."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import ConfigError, Requeue
from common.worker_process import replies_of
from data.formats import prompt_only
from data.groups import from_dict, read_groups, to_dict, write_groups
from data.json_values import LARGEST
from data.rows import Row
from data.types import Completion, Group, Prompt, Turn
from rollouts.rewards import pool
from rollouts.rewards.base import Missing, Reward, RewardError, make_reward, results
from rollouts.rewards.function import columns
from rollouts.rewards.settings import FunctionConfig
from tests.tiny import make_config, reward_of
from tests.unit.rollouts import reward_functions

HERE = "tests.unit.rollouts.reward_functions"


def prompt(text="q", reference=None):
    return Prompt((Turn("system", "s"), Turn("user", text)), reference)


def function(name, max_missing=0.0, **settings):
    return reward_of("function", FunctionConfig(path=f"{HERE}.{name}", **settings), max_missing)


class InThisProcess:
    """A worker that is a process of its own where that is what is tested."""

    def __init__(self, module, log, env):
        self.log, self._worker = log, pool._Worker()
        self.log_to = self.close = lambda *of, **named: None

    def call(self, name, *arguments, timeout):
        return getattr(self._worker, name)(*arguments)


@pytest.fixture
def make(monkeypatch):
    """Rewards whose function runs in this process."""
    monkeypatch.setattr(pool, "WorkerProcess", InThisProcess)
    return make_reward


@pytest.mark.parametrize("name", ["lengths", "plain_lengths", "slow_lengths"])
@pytest.mark.parametrize("typed", [True, False])
def test_order_and_values_survive_batching(make, name, typed):
    """Whether a function takes texts or messages is typed, or tried."""
    conversational = name != "plain_lengths" if typed else None
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


def test_a_column_that_no_row_has_is_refused_before_training(make):
    others = replace(prompt(), columns=json.dumps({"tags": "x", "difficulty": None}))
    for name, row, said in (
        ("sees_columns", prompt(), r"asks for reference.*name its column"),
        ("sees_others", others, "asks for difficulty, and no row has such"),
    ):
        with pytest.raises(ConfigError, match=said):
            make(function(name)).check_prompts([row] * 2)
    assert make(function("sees_columns")).score([prompt(reference="7")], ["a"]) == [7]


def test_a_reward_beyond_float32_is_no_verdict(make):
    """So that no file of groups holds what cannot be read again."""
    reward = make(function("beyond", 0.5, batch_size=1))
    found = reward.score([prompt()] * 4, ["1e39", "-3.5e38", "3.4e38", "7"])
    assert found == [None, None, 3.4e38, 7]
    group = Group(prompt(), tuple(map(Completion, "ab")), tuple(v for v in found if v is not None))
    assert from_dict(to_dict(group)).rewards == group.rewards


MISBEHAVIOUR = {
    "raise": "ValueError: the reward is broken",
    "hang": "took longer than 1 s",
    "die": "ended its process (about to die)",
    "none": "no verdict",
    "nan": "the reward is nan",
    "short": "returned 1 rewards for 2 completions",
    "string": "returned a str, not a list",
    "lambda": "function was given, not a number",
}


def test_misbehaviour_is_no_verdict_with_its_reason_and_the_next_batch_is_scored():
    by_word = make_reward(function("by_word", 0.5, batch_size=2, timeout=1.0, workers=2))
    texts = [text for word in MISBEHAVIOUR for text in (word, "a", "fine", "b")]
    start = time.monotonic()
    assert by_word.score([prompt()] * len(texts), texts) == [None, None, 1.0, 1.0] * len(MISBEHAVIOUR)
    assert by_word.metrics["missing"] == 0.5
    assert time.monotonic() - start < 40  # it hangs for 60
    by_word.max_missing = 0.24
    for word, reason in MISBEHAVIOUR.items():
        with pytest.raises(RewardError, match=r"2 of 8 .*reward\.max_missing=0\.24") as error:
            by_word.score([prompt()] * 8, [word, "a", *["fine", "b"] * 3])
        assert f"2 x {reason}" in str(error.value) or reason in str(error.value)
    by_word.close()


def test_what_a_function_raises_names_its_line_and_is_in_the_log_whole_with_what_it_printed(tmp_path):
    logs = tmp_path / "run" / "logs"
    reward = make_reward(function("talks", batch_size=1, conversational=True), log_dir=logs)
    assert not logs.exists()  # a run that is refused leaves nothing
    assert reward.score([prompt()] * 2, ["[1]", "[1, 2]"]) == [1, 2]
    with pytest.raises(RewardError) as error:
        reward.score([prompt()] * 5, ["[1]", *["oh\nno"] * 4])
    lines = Path(reward_functions.__file__).read_text().splitlines()
    number = next(i for i, line in enumerate(lines, 1) if "json.loads" in line)
    where = f"tests/unit/rollouts/reward_functions.py:{number}"
    assert f"4 x JSONDecodeError: Expecting value: line 1 column 1 (char 0) ({where})" in str(error.value)
    assert f"in full: {logs}/reward.log" in str(error.value)
    reward.close()
    assert [path.name for path in logs.iterdir()] == ["reward.log"]
    said = (logs / "reward.log").read_text()
    assert said.count("scoring 1") == 7 and f'reward_functions.py", line {number}, in talks' in said
    assert said.count("Traceback") == 3  # of one failure no more


def test_a_function_that_cannot_be_imported_is_refused_with_its_line(make, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    for name, text, said in (
        ("lost", "import json\nimport no_such_thing\n", r"No module named 'no_such_thing'.*lost\.py:2\)"),
        ("broken", "x = 1\ndef f(:\n", r"SyntaxError: .*\(broken\.py, line 2\)"),
        ("without_it", "g = 1\n", "has no attribute|cannot import"),
    ):
        (tmp_path / f"{name}.py").write_text(text)
        with pytest.raises(ConfigError, match=said):
            make(reward_of("function", FunctionConfig(path=f"{name}.f")), log_dir=tmp_path / "logs")
    assert not (tmp_path / "logs").exists()


@given(st.lists(st.one_of(st.floats(), st.just(Missing("why"))), min_size=1), st.floats(0, 1))
def test_a_reward_never_makes_a_number_of_a_missing_verdict(values, cap):
    fixed = SimpleNamespace(score=lambda prompts, completions: values, metrics={}, log_dir=None)
    reward = Reward(fixed, cap)
    bad = [isinstance(v, Missing) or not abs(v) <= LARGEST for v in values]
    ask = [prompt()] * len(values), [""] * len(values)
    if sum(bad) / len(bad) > cap:
        with pytest.raises(RewardError):
            reward.score(*ask)
    else:
        assert [v is None for v in reward.score(*ask)] == bad


# -- waiting for other processes -------------------------------------------------------------------


def test_a_failure_is_not_waited_for_behind_slower_tasks():
    held, threads = threading.Event(), ThreadPoolExecutor(2)
    begun = time.monotonic()
    with pytest.raises(ZeroDivisionError):
        results([threads.submit(lambda i=i: held.wait(20) if i == 0 else 1 / 0) for i in (0, 1, 2)])
    assert time.monotonic() - begun < 5
    held.set()


def test_a_pool_that_is_closed_at_work_leaves_no_process():
    reward = make_reward(function("by_word", 1.0, batch_size=1, timeout=60.0))
    threading.Thread(target=reward.score, args=([prompt()], ["hang"]), daemon=True).start()
    while not reward.scorer._pool._busy:
        time.sleep(0.05)
    (worker,) = reward.scorer._pool._busy
    begun = time.monotonic()
    reward.close()
    assert time.monotonic() - begun < 10
    assert worker._process.wait(10) is not None


def test_a_run_that_is_asked_to_stop_does_not_wait_for_what_does_not_answer(monkeypatch):
    monkeypatch.setattr("common.progress._requested", lambda: True)
    engine = SimpleNamespace(ready=time.sleep)
    for wait_for_it in (lambda: results([Future()]), lambda: replies_of([engine], 600.0)):
        with pytest.raises(Requeue):
            wait_for_it()
