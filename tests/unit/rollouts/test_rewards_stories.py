"""``reward=instruct`` and ``reward=instruct_proxy``: the true reward of a story, and a judge that errs."""

from __future__ import annotations

from statistics import fmean

import pytest

from common.errors import ConfigError
from data import instruct
from data.sources import load_groups
from data.stories import error
from data.types import Prompt, Turn
from rollouts.rewards.base import RewardError
from rollouts.rewards.factory import make_reward
from tests.other_language import kitchen, write_other
from tests.tiny import make_config

LANGUAGE = instruct.embedded()


def judge(kind, *settings):
    config = make_config("model=instruct", "data=instruct", f"reward={kind}", *settings)
    return make_reward(config.reward_config)


def written(number=40):
    asked = instruct.prompts(LANGUAGE, "validation", number)
    return list(asked), [instruct.candidates(LANGUAGE, p, ["half"])[0].text for p in asked]


def test_the_reward_is_the_storys_worth_and_its_parts_are_logged():
    prompts, stories = written()
    reward = judge("instruct")
    worth = [LANGUAGE.score(instruct.text_of(p), s) for p, s in zip(prompts, stories, strict=True)]
    assert reward.score(prompts, stories) == worth
    parts = {name: reward.metrics[f"reward_{name.lower()}"] for name in LANGUAGE.reward}
    points = sum(LANGUAGE.reward[name] * share for name, share in parts.items())
    assert points == pytest.approx(fmean(worth), abs=1e-3)
    assert reward.metrics["reward_words"] == fmean(len(s.split()) for s in stories)


def test_the_judge_of_the_offline_data_labels_samples_alike():
    """The same story under the same prompt has the reward that the offline pair has."""
    groups = load_groups(make_config("model=instruct", "data=instruct").data, "train").groups[:50]
    asked = [g.prompt for g in groups for _ in g.completions]
    stories = [c.text for g in groups for c in g.completions]
    assert judge("instruct_proxy").score(asked, stories) == [r for g in groups for r in g.rewards]


def test_a_bias_for_length_is_points_a_word():
    prompts, stories = written(5)
    plain, biased = judge("instruct"), judge("instruct", "reward.instruct.length_bias=-0.5")
    words = [len(s.split()) for s in stories]
    gained = [
        b - a for a, b in zip(plain.score(prompts, stories), biased.score(prompts, stories), strict=True)
    ]
    assert gained == pytest.approx([-0.5 * n for n in words])
    noisy = judge("instruct", "reward.instruct.noise=2").score(prompts, stories)
    assert noisy[0] - plain.score(prompts, stories)[0] == pytest.approx(
        error(instruct.text_of(prompts[0]), stories[0], 2.0, 0.0)
    )


def test_another_language_is_judged_by_its_own_file(tmp_path):
    own = judge("instruct", f"reward.instruct.language={write_other(tmp_path / 'kitchen.yaml')}")
    asked = instruct.story_prompt("hot ann soup one")
    assert own.score([asked], ["ann cooked a spicy soup . enjoy ."]) == [10.0]
    assert sum(kitchen().reward.values()) == 10


def test_what_is_no_prompt_of_the_language_has_no_verdict():
    with pytest.raises(RewardError, match="is none of this language"):
        judge("instruct").score([Prompt((Turn("user", "12+34="),))], ["46"])


@pytest.mark.parametrize("setting", ["noise=-1", "length_bias=nan", "language=nowhere.yaml"])
def test_a_judge_that_cannot_be_is_refused(setting):
    with pytest.raises(ConfigError, match=f"reward.instruct.{setting}"):
        judge("instruct", f"reward.instruct.{setting}")
