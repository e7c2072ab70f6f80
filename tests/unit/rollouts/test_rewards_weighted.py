"""Several rewards as one: the weighted sum, what is missing, and what is refused."""

from __future__ import annotations

import pytest

from common.errors import ConfigError
from config.schema_rewards import RewardConfig, WeightedConfig
from data.types import Prompt, Turn
from rollouts.rewards.base import make_reward
from tests.tiny import reward_of
from tests.unit.rollouts.test_rewards_function import make  # noqa: F401 (a fixture)

pytestmark = pytest.mark.usefixtures("make")  # functions run in this process


FUNCTIONS = "tests.unit.rollouts.reward_functions"
PROMPT = Prompt((Turn("user", "12+34"),), "46")
LENGTHS = {"reward": "function", "path": f"{FUNCTIONS}.lengths", "conversational": True}


def weighted(max_missing=0.0, normalize="none", **parts):
    config = reward_of("weighted", WeightedConfig(parts=parts, normalize=normalize), max_missing)
    return make_reward(config)


def alone(kind, **settings):
    return make_reward(WeightedConfig(parts={kind: {"weight": 1, **settings}}).typed()[kind].reward)


def test_the_sum_is_weighted_and_each_part_is_logged():
    texts = ["; 46", "46", "longer than that; 46", "; 45"]
    sums = alone("adder").score([PROMPT] * 4, texts)
    reward = weighted(adder={"weight": 0.5}, short={"weight": -0.125, **LENGTHS})
    found = reward.score([PROMPT] * 4, texts)
    assert found == pytest.approx([0.5 * s - 0.125 * len(t) for s, t in zip(sums, texts, strict=True)])
    assert reward.metrics["reward_adder"] == pytest.approx(sum(sums) / 4)
    assert reward.metrics["reward_short"] == pytest.approx(sum(map(len, texts)) / 4)


def test_rewards_that_are_normalised_apart_keep_their_weights_whatever_their_scales():
    """Of each part its own (score - mean) / std among a prompt's answers, then the weighted sum (GDPO)."""
    other = Prompt((Turn("user", "1+2"),), "3")
    asked = [PROMPT, PROMPT, other, PROMPT, other]
    texts = ["; 46", "; 45 and more", "; 3", "46 of these", "; 3"]
    reward = weighted(normalize="group", adder={"weight": 2}, short={"weight": -0.5, **LENGTHS})
    found = reward.score(asked, texts)
    right, lengths = alone("adder").score(asked, texts), [float(len(t)) for t in texts]
    for place, prompt in enumerate(asked):
        of = [i for i, one in enumerate(asked) if one is prompt]
        wanted = 0.0
        for weight, values in ((2, right), (-0.5, lengths)):
            mean = sum(values[i] for i in of) / len(of)
            std = (sum((values[i] - mean) ** 2 for i in of) / len(of)) ** 0.5
            wanted += weight * (values[place] - mean) / std if std else 0.0
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
        ({}, "", "give rewards with weights"),
        ({"a b": {"weight": 1}}, "", "letters, digits and underscores"),
        ({"adder": 1}, ".adder", "give rewards with weights"),
        ({"adder": {}}, ".adder.weight", "a number that is not 0"),
        ({"adder": {"weight": float("nan")}}, ".adder.weight", "a number that is not 0"),
        ({"x": {"weight": 1}}, ".x.reward", "there is no such file in config/reward"),
        ({"x": {"weight": 1, "reward": "weighted"}}, ".x.reward", "is this reward itself"),
        ({"function": {"weight": 1}}, ".function.path", "has no default"),
        ({"f": {"weight": 1, **LENGTHS, "timout": 1}}, ".f.timout", "is not a setting"),
        ({"f": {"weight": 1, **LENGTHS, "workers": 0}}, ".f.workers", "must be at least 1"),
        ({"f": {"weight": 1, **LENGTHS, "path": "nowhere.f"}}, ".f.path", "nowhere"),
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
