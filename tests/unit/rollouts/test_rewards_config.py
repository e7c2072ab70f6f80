"""Every shipped reward file is a RewardConfig, and what makes no sense is refused with key and remedy.
Several rewards as one: the weighted sum, what is missing, and what is refused."""

from __future__ import annotations

import sys
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from omegaconf import OmegaConf

from common.errors import ConfigError
from common.imports import import_function
from config.schema_rewards import OWN_KEYS, RewardConfig
from data.types import Prompt, Turn
from rollouts.rewards import pool
from rollouts.rewards.base import make_reward
from rollouts.rewards.settings import (
    ClassifierConfig,
    FunctionConfig,
    JudgeConfig,
    RewardModelConfig,
    VerifierConfig,
    WeightedConfig,
)
from tests.tiny import reward_of
from tests.unit.rollouts.test_rewards_function import InThisProcess

ROOT = Path(__file__).parents[3]
FILES = sorted((ROOT / "config" / "reward").glob("*.yaml"))
FUNCTIONS = "tests.unit.rollouts.reward_functions"
PROMPT = Prompt((Turn("user", "12+34"),), "46")
LENGTHS = {"reward": "function", "path": f"{FUNCTIONS}.lengths", "conversational": True}
JUDGE = {"base_url": "http://x", "model": "m", "prompt": "{completion}", "api_key_env": None}
UNSET = JUDGE | LENGTHS | {"name_or_path": "org/name", "parts": {"verifier": {"weight": 1}}}


@pytest.fixture(autouse=True)
def here(monkeypatch):
    """Functions run in this process."""
    monkeypatch.setattr(pool, "WorkerProcess", InThisProcess)


def read(file):
    return OmegaConf.to_container(OmegaConf.load(file))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_shipped_files(file, monkeypatch):
    """Every key is there."""
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    raw = read(file)
    section = next(key for key in raw if key not in OWN_KEYS)
    raw[section] = {key: UNSET[key] if value == "???" else value for key, value in raw[section].items()}
    config = RewardConfig.from_tree(raw)
    assert config.name == file.stem and config.kind == section
    assert set(raw[section]) == {f.name for f in fields(config.settings)}
    assert callable(import_function("reward._target_", config.target))
    weights = [getattr(config.settings, name, None) for name in ("accuracy", "format", "tag_count")]
    assert weights == [8, 1, 1] or section != "verifier", "the paper's"


def changed(**changes):
    """The shipped verifier with other keys."""
    tree = read(ROOT / "config" / "reward" / "verifier.yaml") | changes
    return RewardConfig.from_tree({key: value for key, value in tree.items() if value is not Ellipsis})


@pytest.mark.parametrize(
    ("make", "key"),
    [
        (lambda: changed(verifier=...), "reward"),
        (lambda: changed(function={"path": "a.b"}), "reward"),
        (lambda: changed(max_missing=1.5), "reward.max_missing"),
        (lambda: changed(name=None), "reward.name"),
        (lambda: changed(_target_="nowhere.make"), "reward._target_"),
        (lambda: changed(verifier={"accuracy": 8, "acuracy": 1}), "reward.verifier.acuracy"),
        (lambda: FunctionConfig(path="reward"), "reward.function.path"),
        (lambda: JudgeConfig(**JUDGE | {"base_url": "x"}), "reward.judge.base_url"),
        (lambda: JudgeConfig(**JUDGE | {"prompt": "rate it"}), "reward.judge.prompt"),
        (lambda: JudgeConfig(**JUDGE | {"api_key_env": "ABSENT"}), "reward.judge.api_key_env"),
        (lambda: JudgeConfig(**JUDGE | {"pattern": "x"}), "reward.judge.pattern"),
        (lambda: JudgeConfig(**JUDGE | {"min_score": 10.0}), "reward.judge.min_score"),
        (lambda: VerifierConfig(accuracy=-1), "reward.verifier.accuracy"),
        (lambda: VerifierConfig(accuracy=0, format=0, tag_count=0), "reward.verifier.accuracy"),
        (lambda: RewardModelConfig(dtype="float16"), "reward.armorm.dtype"),
        (lambda: ClassifierConfig(rendering="pair"), "reward.classifier.rendering"),
        (lambda: RewardModelConfig(name_or_path="m", max_length=1), "reward.armorm.max_prompt_length"),
    ],
)
def test_what_makes_no_sense_is_refused(make, key):
    with pytest.raises(ConfigError) as error:
        make()
    assert error.value.key == key


def test_a_verifier_without_its_package_is_refused_with_the_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    monkeypatch.delitem(sys.modules, "rollouts.rewards.mathverify", raising=False)
    with pytest.raises(ConfigError, match="pip install 'math-verify"):
        make_reward(reward_of("verifier", VerifierConfig()))


def weighted(max_missing=0.0, normalize="none", **parts):
    config = reward_of("weighted", WeightedConfig(parts=parts, normalize=normalize), max_missing)
    return make_reward(config)


def test_the_sum_is_weighted_and_each_part_is_logged_and_may_be_normalised_apart():
    """Then of each part its own (score - mean) / std among a prompt's answers, and the weighted sum of these
    (GDPO)."""
    other = Prompt((Turn("user", "1+2"),), "3")
    asked = [PROMPT, PROMPT, other, PROMPT, other]
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
    with pytest.raises(ConfigError, match=r"reward\.weighted\.normalize"):
        weighted(normalize="batch", adder={"weight": 2})


def test_what_one_part_does_not_know_nobody_knows():
    other = {"weight": 2, **LENGTHS, "path": f"{FUNCTIONS}.none_for_long"}
    reward = weighted(1.0, a={"weight": 1, **LENGTHS}, b=other)
    assert reward.score([PROMPT] * 2, ["abc", "x" * 50]) == [9.0, None]


@pytest.mark.parametrize(
    ("parts", "key", "said"),
    [
        ({"a b": {"weight": 1}}, "", "letters, digits and underscores"),
        ({"adder": 1}, ".adder", "give rewards with weights"),
        ({"adder": {"weight": float("nan")}}, ".adder.weight", "a number that is not 0"),
        ({"x": {"weight": 1, "reward": "weighted"}}, ".x.reward", "is this reward itself"),
        ({"function": {"weight": 1}}, ".function.path", "has no default"),
        ({"f": {"weight": 1, **LENGTHS, "timout": 1}}, ".f.timout", "is not a setting"),
        ({"f": {"weight": 1, **LENGTHS, "workers": 0}}, ".f.workers", "must be at least 1"),
    ],
)
def test_what_makes_no_sense_is_refused_by_its_key(parts, key, said):
    with pytest.raises(ConfigError, match=said) as error:
        weighted(**parts)
    assert error.value.key == f"reward.weighted.parts{key}"


def test_a_part_that_compares_makes_the_sum_compare():
    tree = {"name": "w", "max_missing": 0, "_target_": "rollouts.rewards.weighted.make"}
    for part, needed in ({"adder": {"weight": 1}}, True), ({"f": {"weight": 1, **LENGTHS}}, False):
        assert RewardConfig.from_tree(tree | {"weighted": {"parts": part}}).needs_reference is needed
