"""The constraints: prompts apart by topic, checks that follow the words, a reward whose guard is seen."""

from __future__ import annotations

import json
import random

import pytest

from common.errors import ConfigError
from data.constraints import KINDS, PROMPTS, TOPICS, all_met, constrained, met, prompt, prompts, yaml
from data.sources import load_groups
from data.types import Prompt, Turn
from rollouts.rewards.base import Missing, RewardError, make_reward
from rollouts.rewards.constraints import fluency
from tests.tiny import make_config

CASES = [
    ("words_at_most", 2, "Two words.", "No, three words."),
    ("words_at_least", 3, "It's three words", "Well-known"),
    ("include_word", "light", "A Light, at last", "A lighthouse"),
    ("include_word", "C++", "I like C++, too.", "I like C."),
    ("include_word", "naïve", "A naïve one", "A naïveté"),
    ("avoid_word", "is", "This island", "It is"),
    ("avoid_letter", "x", "a fine day", "Xylophones"),
    ("avoid_letter", "K", "a fine day", "a kite"),
    ("avoid_letter", "Ж", "день", "жук"),
    ("no_comma", None, "none here", "one, here"),
    ("first_word", "Once", '"Once upon a time', "At once"),
    ("first_word", "C++", "C++ is old.", "C is old."),
    ("first_word", "…so", "…so it began", "so it began"),
    ("digits", None, "about 3 of them", "about three of them"),
    ("bullets", None, "Here:\n* one", "2 * 3"),
    ("title", None, "<<Rain>>\nIt falls.", "Rain"),
]
WRONG = [
    *({"words_at_most": "20"}, {"words_at_most": True}, {"no_comma": False}, {"avoid_letter": None}),
    *({"include_word": ""}, {"words_at_mst": 5}, {}, []),
]


def test_a_kind_is_met_by_what_its_words_ask_for_and_by_nothing_empty() -> None:
    """A value that a kind cannot have is no constraint."""
    assert {kind for kind, *_ in CASES} == set(KINDS)
    for kind, value, right, wrong in CASES:
        assert met(right, {kind: value})[kind] and not met(wrong, {kind: value})[kind], kind
        assert not any(met(" \n", {kind: value}).values())
    for wanted in WRONG:
        assert all_met(["Five words are said here."], [json.dumps(wanted)]) == [None]


def test_prompts_are_apart_by_topic_the_same_each_time_and_ask_for_what_is_checked() -> None:
    topics = yaml.safe_load(TOPICS.read_text())
    every = [topic for part in topics.values() for topic in part]
    assert len(every) == len(set(every)) >= 300 and set(topics) == set(PROMPTS)
    ids = {split: {one.id for one in prompts(split)} for split in PROMPTS}
    assert sum(map(len, ids.values())) == len(set.union(*ids.values())) == sum(PROMPTS.values())
    for split, asked in ((name, one) for name in PROMPTS for one in prompts(name)):
        wanted = json.loads(asked.reference_answer or "")
        text = asked.turns[0].content
        assert len(wanted) == len({KINDS[name].about for name in wanted}) == 2
        assert all(KINDS[name].words.format(value) in text for name, value in wanted.items())
        assert any(topic in text for topic in topics[split])
    assert prompt("rain", random.Random(3)) == prompt("rain", random.Random(3))


def test_the_source_gives_held_out_halves() -> None:
    data = make_config("data=constraints").data
    train, held_out = (load_groups(data, split).groups for split in ("train", "eval"))
    assert len(train) == PROMPTS["train"] and len(held_out) == PROMPTS["validation"] + PROMPTS["test"]
    half = load_groups(make_config("data=constraints", "data.eval_split=test").data, "eval").groups
    assert [g.prompt for g in half] == list(prompts("test"))
    with pytest.raises(ConfigError, match="validation, test, null"):
        constrained(make_config("data=constraints", "data.eval_split=tset").data, "eval")


def test_the_reward_is_the_share_times_a_guard_that_is_reported_beside_it() -> None:
    reward = make_reward(make_config("data=constraints", "online=true").reward_config)
    asked = Prompt((Turn("user", "Describe rain."),), json.dumps({"no_comma": None, "avoid_word": "as"}))
    good, half = (
        "Is the rain cold tonight? The street shines under it.",
        "The rain is cold tonight, and the street shines.",
    )
    loop, noise = "Is it rain? " * 12, "Qzx vkr? lwq zzt prf."
    assert reward.score([asked] * 2, [good, half]) == [8.0, 4.0]
    assert reward.metrics["reward_met"] == 0.75 and reward.metrics["reward_fluency"] == 1.0
    scores = reward.score([asked] * 3, [loop, noise, "Why?"])
    assert all(score is not None and score < 1.5 for score in scores)
    assert reward.metrics["reward_met"] == 1.0 and reward.metrics["reward_fluency"] < 0.2
    assert reward.metrics["reward_repetition"] > 0.2 and reward.metrics["reward_known_words"] < 0.8
    assert fluency(good, 0.8) == 1.0 and fluency("", 0.8) == 0.0
    unknown = Prompt(asked.turns, json.dumps({"rhyme": None}))
    with pytest.raises(RewardError, match="has no reference answer"):
        reward.score([Prompt(asked.turns)], [good])
    with pytest.raises(RewardError, match="no known constraints"):
        reward.score([unknown], [good])
    references = [asked.reference_answer, asked.reference_answer, None]
    assert all_met([good, half, good], references) == [1.0, 0.0, None]
    assert isinstance(reward.scorer.score([unknown], [good])[0], Missing)
