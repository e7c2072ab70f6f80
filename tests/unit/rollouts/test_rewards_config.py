"""Every shipped reward file is a RewardConfig, and what makes no sense is refused with key and remedy."""

from __future__ import annotations

import sys
from dataclasses import fields
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from common.errors import ConfigError
from common.imports import import_function
from config.schema_rewards import (
    OWN_KEYS,
    ClassifierConfig,
    FunctionConfig,
    RewardConfig,
    RewardModelConfig,
    VerifierConfig,
)
from rollouts.rewards import pool
from rollouts.rewards.base import make_reward
from tests.tiny import reward_of
from tests.unit.rollouts.test_rewards_function import InThisProcess

ROOT = Path(__file__).parents[3]
FILES = sorted((ROOT / "config" / "reward").glob("*.yaml"))
UNSET = {
    "path": "tests.unit.rollouts.reward_functions.lengths",
    "name_or_path": "org/name",
    "model": "m",
    "base_url": "http://localhost:5000/score",
    "parts": {"verifier": {"weight": 1}},
}


def read(file):
    """(the file as it is, the name of its section)"""
    raw = OmegaConf.to_container(OmegaConf.load(file))
    return raw, next(key for key in raw if key not in OWN_KEYS)


def load(file):
    raw, section = read(file)
    raw[section] = {key: UNSET[key] if value == "???" else value for key, value in raw[section].items()}
    return RewardConfig.from_tree(raw)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_shipped_files(file, monkeypatch):
    """Every key is there, with its comment."""
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    config, (raw, section) = load(file), read(file)
    assert config.name == file.stem and config.kind == section
    assert set(raw[section]) == {f.name for f in fields(config.settings)}
    assert callable(import_function("reward._target_", config.target))
    weights = [getattr(config.settings, name, None) for name in ("accuracy", "format", "tag_count")]
    assert weights == [8, 1, 1] or section != "verifier", "the paper's"


def changed(without=None, **changes):
    """The shipped verifier with other keys."""
    tree = OmegaConf.to_container(OmegaConf.load(ROOT / "config" / "reward" / "verifier.yaml")) | changes
    return RewardConfig.from_tree({key: value for key, value in tree.items() if key != without})


@pytest.mark.parametrize(
    ("make", "key"),
    [
        (lambda: changed(without="verifier"), "reward"),
        (lambda: changed(function={"path": "a.b"}), "reward"),
        (lambda: changed(max_missing=1.5), "reward.max_missing"),
        (lambda: changed(name=None), "reward.name"),
        (lambda: changed(_target_="nowhere.make"), "reward._target_"),
        (lambda: changed(_target_="json.dumps"), "reward._target_"),
        (lambda: changed(verifier={"accuracy": 8, "acuracy": 1}), "reward.verifier.acuracy"),
        (lambda: changed(verifier={"workers": "many"}), "reward.verifier.workers"),
        (lambda: FunctionConfig(path="reward"), "reward.function.path"),
        (lambda: FunctionConfig(path="a.b", workers=0), "reward.function.workers"),
        (lambda: VerifierConfig(accuracy=-1), "reward.verifier.accuracy"),
        (lambda: VerifierConfig(accuracy=0, format=0, tag_count=0), "reward.verifier.accuracy"),
        (lambda: RewardModelConfig(dtype="float16"), "reward.armorm.dtype"),
        (lambda: ClassifierConfig(rendering="pair"), "reward.classifier.rendering"),
        (
            lambda: ClassifierConfig(name_or_path="m", max_length=10, max_prompt_length=10),
            "reward.classifier.max_prompt_length",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(make, key):
    with pytest.raises(ConfigError) as error:
        make()
    assert error.value.key == key


def test_a_verifier_without_its_package_is_refused_with_the_remedy(monkeypatch):
    monkeypatch.setattr(pool, "WorkerProcess", InThisProcess)
    monkeypatch.setitem(sys.modules, "math_verify", None)
    monkeypatch.delitem(sys.modules, "rollouts.rewards.mathverify", raising=False)
    with pytest.raises(ConfigError, match="pip install 'math-verify"):
        make_reward(reward_of("verifier", VerifierConfig()))
