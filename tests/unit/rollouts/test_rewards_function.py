"""Rewards by a user's function: what it may return, and everything it may do wrong. None of it is ever a
silent 0. Several rewards as one: the weighted sum, what is missing, and what is refused."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import ConfigError, Requeue
from common.worker_process import replies_of
from config.files import section
from config.schema_rewards import RewardConfig
from data.formats import prompt_only
from data.groups import read_groups, write_groups
from data.json_values import LARGEST
from data.rows import Row
from data.types import Prompt, Turn
from jobs import stages
from rollouts.rewards import pool
from rollouts.rewards.base import Missing, Reward, RewardError, finite, make_reward, results
from rollouts.rewards.function import columns
from rollouts.rewards.settings import (
    FunctionConfig,
    JudgeConfig,
    RewardModelConfig,
    VerifierConfig,
    WeightedConfig,
)
from rollouts.rewards.verifier import VerifierReward
from tests.programs import until
from tests.tiny import make_config, reward_of

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


@pytest.mark.parametrize(
    ("name", "typed"),
    [("lengths", True), ("lengths", False), ("plain_lengths", False), ("slow_lengths", True)],
)
def test_order_and_values_survive_batching(make, name, typed):
    """Whether a function takes texts or messages is typed, or tried."""
    conversational = name != "plain_lengths" if typed else None
    texts = ["x" * n for n in (3, 1, 4, 1, 5, 9, 2)]
    reward = make(function(name, batch_size=3, workers=2, conversational=conversational))
    assert reward.score([prompt()] * 7, texts) == [3, 1, 4, 1, 5, 9, 2]
    assert reward.metrics["missing"] == 0 and reward.score([], []) == []


def test_the_columns_of_a_row_go_by_their_names_and_the_first_call_is_shown(make, capsys, tmp_path):
    """From the rows, by way of a file of samples. One goes before the reference answer of its name."""
    rows = [{"prompt": f"q{i}", "difficulty": i, "tags": ["a"] * 3, "x": float("nan")} for i in (1, 2)]
    config = make_config("data=local", "data.path=x.jsonl", "data.eval_fraction=0").data
    made = list(prompt_only([Row("x", i, row) for i, row in enumerate(rows)], config))
    write_groups(tmp_path / "groups.jsonl", made)
    assert read_groups(tmp_path / "groups.jsonl") == made
    reward, prompts = make(function("sees_others")), [group.prompt for group in made]
    reward.check_prompts(prompts)
    assert reward.score(prompts, ["one", "two"]) == [3, 6] == reward.score(prompts, ["one", "two"])
    assert capsys.readouterr().out.count("difficulty=[1, …]") == 1
    own = [replace(prompt("a", "7"), columns=json.dumps({"solution": "3 + 4"})), prompt("b", "8")]
    given = columns(own, ["x", "y"], conversational=False)
    assert given["solution"] == ["3 + 4", None] and given["answer"] == given["reference"] == ["7", "8"]


def test_a_column_that_no_row_has_is_refused_before_training(make):
    others = replace(prompt(), columns=json.dumps({"tags": "x", "difficulty": None}))
    with pytest.raises(ConfigError, match=r"asks for reference.*name its column"):
        make(function("sees_columns")).check_prompts([prompt()])
    with pytest.raises(ConfigError, match="asks for difficulty, and no row has such"):
        make(function("sees_others")).check_prompts([others])
    assert make(function("sees_columns")).score([prompt(reference="7")], ["a"]) == [7]


MISBEHAVIOUR = {
    "raise": "ValueError: the reward is broken",
    "hang": "took longer than 1 s",
    "die": "ended its process (about to die)",
    "none": "no verdict",
    "nan": "the reward is nan",
    "short": "returned 1 rewards for 2 completions",
    "string": "returned a str, not a list",
}


def test_misbehaviour_is_no_verdict_with_its_reason_and_the_next_batch_is_scored():
    reward = make_reward(function("by_word", 0.24, batch_size=2, timeout=1.0, workers=2))
    texts = [text for word in MISBEHAVIOUR for text in (word, "a", "fine", "b")]
    start = time.monotonic()
    verdicts = reward.scorer.score([prompt()] * len(texts), texts)
    assert time.monotonic() - start < 40  # it hangs for 60
    assert verdicts[2::4] == verdicts[3::4] == [1.0] * len(MISBEHAVIOUR)
    for i, reason in enumerate(MISBEHAVIOUR.values()):
        assert all(reason in finite(verdict).reason for verdict in verdicts[4 * i : 4 * i + 2])
    with pytest.raises(RewardError, match=r"2 of 8 .*reward\.max_missing=0\.24\n  2 x ValueError"):
        reward.score([prompt()] * 8, ["raise", "a", *["fine", "b"] * 3])
    assert reward.metrics["missing"] == 0.25
    reward.close()


def test_what_a_function_raises_names_its_line_and_is_in_the_log_with_what_it_printed(tmp_path):
    logs = tmp_path / "run" / "logs"
    reward = make_reward(function("talks", batch_size=1, conversational=True), log_dir=logs)
    assert not logs.exists()  # a run that is refused leaves nothing
    where = r"tests/unit/rollouts/reward_functions\.py:\d+"
    said = rf"4 x JSONDecodeError: Expecting value: .* \({where}\)(?s:.*)in full: {logs}/reward\.log"
    with pytest.raises(RewardError, match=said):
        reward.score([prompt()] * 5, ["[1]", *["oh\nno"] * 4])
    reward.close()
    said = (logs / "reward.log").read_text()
    assert said.count("scoring 1") == 5 and said.count("Traceback") == 3  # of one failure no more


def test_a_function_that_cannot_be_imported_is_refused_with_its_line(make, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "lost.py").write_text("import json\nimport no_such_thing\n")
    with pytest.raises(ConfigError, match=r"No module named 'no_such_thing'.*lost\.py:2\)"):
        make(reward_of("function", FunctionConfig(path="lost.f")), log_dir=tmp_path / "logs")
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


def test_a_pool_that_is_closed_at_work_leaves_no_process():
    reward = make_reward(function("by_word", 1.0, batch_size=1, timeout=60.0))
    threading.Thread(target=reward.score, args=([prompt()], ["hang"]), daemon=True).start()
    until(lambda: reward.scorer._pool._busy)
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


# -- settings, and several rewards as one ----------------------------------------------------------

SUM = Prompt((Turn("user", "12+34"),), "46")
LENGTHS = {"reward": "function", "path": f"{HERE}.lengths", "conversational": True}
JUDGE = {"base_url": "http://x", "model": "m", "prompt": "{completion}", "api_key_env": None}
PARTS = "reward.weighted.parts"


def weighted(max_missing=0.0, normalize="none", **parts):
    settings = WeightedConfig(parts=parts, normalize=normalize)
    return make_reward(reward_of("weighted", settings, max_missing))


def changed(**changes):
    """The shipped verifier with other keys."""
    return RewardConfig.from_tree(section("reward/verifier.yaml") | changes)


@pytest.mark.parametrize(
    ("wrong", "key"),
    [
        (lambda: changed(function={"path": "a.b"}), "reward"),
        (lambda: changed(_target_="nowhere.make"), "reward._target_"),
        (lambda: changed(verifier={"accuracy": 8, "acuracy": 1}), "reward.verifier.acuracy"),
        (lambda: FunctionConfig(path="reward"), "reward.function.path"),
        (lambda: JudgeConfig(**JUDGE | {"base_url": "x"}), "reward.judge.base_url"),
        (lambda: JudgeConfig(**JUDGE | {"prompt": "rate it"}), "reward.judge.prompt"),
        (lambda: JudgeConfig(**JUDGE | {"api_key_env": "ABSENT"}), "reward.judge.api_key_env"),
        (lambda: JudgeConfig(**JUDGE | {"min_score": 10.0}), "reward.judge.min_score"),
        (lambda: VerifierConfig(accuracy=0, format=0, tag_count=0), "reward.verifier.accuracy"),
        (lambda: RewardModelConfig(name_or_path="m", max_length=1), "reward.armorm.max_prompt_length"),
        (lambda: weighted(**{"a b": {"weight": 1}}), PARTS),
        (lambda: weighted(adder=1), f"{PARTS}.adder"),
        (lambda: weighted(adder={"weight": float("nan")}), f"{PARTS}.adder.weight"),
        (lambda: weighted(x={"weight": 1, "reward": "weighted"}), f"{PARTS}.x.reward"),
        (lambda: weighted(f={"weight": 1, **LENGTHS, "timout": 1}), f"{PARTS}.f.timout"),
        (lambda: weighted(f={"weight": 1, **LENGTHS, "workers": 0}), f"{PARTS}.f.workers"),
        (lambda: weighted(normalize="batch", adder={"weight": 2}), "reward.weighted.normalize"),
    ],
)
def test_settings_that_make_no_sense_are_refused(wrong, key):
    with pytest.raises(ConfigError) as error:
        wrong()
    assert error.value.key == key


def test_what_is_no_scorer_is_refused_and_a_reward_that_cannot_be_used_is_closed(monkeypatch):
    """The prompts are checked once the reward has its processes."""
    closed, world = [], SimpleNamespace(is_main=True, device="cpu")

    def refuse(self, prompts):
        raise ConfigError("reward", "a", "asks for a column that no prompt has")

    monkeypatch.setattr(stages, "on_every_rank", lambda work: [work()])
    monkeypatch.setattr(VerifierReward, "check_prompts", refuse, raising=False)
    monkeypatch.setattr(VerifierReward, "close", lambda self: closed.append(self))
    with pytest.raises(ConfigError, match="no prompt has"):
        stages.reward_on_ranks(changed(), world, None, [Prompt((Turn("user", "q"),))])
    assert len(closed) == 1
    monkeypatch.setattr("rollouts.rewards.verifier.make", lambda *settings: object())
    with pytest.raises(ConfigError, match=r"reward\._target_=.*made a object, which does not extend Scorer"):
        make_reward(changed())


def test_the_sum_is_weighted_and_each_part_is_logged_and_may_be_normalised_apart(make):
    """Then of each part its own (score - mean) / std among a prompt's answers, and the weighted sum of these
    (GDPO)."""
    other = Prompt((Turn("user", "1+2"),), "3")
    asked = [SUM, SUM, other, SUM, other]
    texts = ["; 46", "; 45 and more", "; 3", "46 of these", "; 3"]
    parts = {"adder": {"weight": 2}, "short": {"weight": -0.5, **LENGTHS}}
    right = weighted(adder={"weight": 1}).score(asked, texts)
    lengths = [float(len(t)) for t in texts]
    plain = weighted(**parts)
    assert plain.score(asked, texts) == [2 * a - 0.5 * b for a, b in zip(right, lengths, strict=True)]
    assert plain.metrics["reward_adder"] == pytest.approx(sum(right) / 5)
    reward = weighted(normalize="group", **parts)
    found = reward.score(asked, texts)
    for place, prompt in enumerate(asked):
        of = [i for i, one in enumerate(asked) if one is prompt]
        wanted = 0.0
        for weight, values in ((2, np.array(right)), (-0.5, np.array(lengths))):
            std = values[of].std()
            wanted += weight * (values[place] - values[of].mean()) / std if std else 0.0
        assert found[place] == pytest.approx(wanted, rel=1e-12)
    assert found[2] == found[4] == 0 and len(set(found[:2])) == 2
    assert reward.metrics["reward_short"] == pytest.approx(sum(lengths) / 5), "logged as it was scored"


def test_what_one_part_does_not_know_nobody_knows_and_one_that_compares_makes_the_sum_compare(make):
    other = {"weight": 2, **LENGTHS, "path": f"{HERE}.none_for_long"}
    reward = weighted(1.0, a={"weight": 1, **LENGTHS}, b=other)
    assert reward.score([SUM] * 2, ["abc", "x" * 50]) == [9.0, None]
    tree = {"name": "w", "max_missing": 0, "_target_": "rollouts.rewards.weighted.make"}
    for part, needed in ({"adder": {"weight": 1}}, True), ({"f": {"weight": 1, **LENGTHS}}, False):
        assert RewardConfig.from_tree(tree | {"weighted": {"parts": part}}).needs_reference is needed
