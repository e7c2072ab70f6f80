"""The embedded task and the constraints: their prompts, rewards, sources and assets."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import ConfigError
from config.schema_data import DataConfig
from data import adder
from data.adder import Noise, demonstration
from data.constraints import KINDS, PROMPTS, TOPICS, all_met, constrained, met, prompts, yaml
from data.sources import load_groups
from data.types import Prompt, Turn
from rollouts.rewards.base import RewardError, make_reward
from rollouts.rewards.constraints import fluency, fluent_and_met, share_of_reward
from tests.tiny import ROOT, make_config

ASSETS = ROOT / "assets" / "adder"
FILES = {"path": str(ASSETS / "pairs.jsonl"), "eval_path": str(ASSETS / "eval_pairs.jsonl")}
PAIRS = DataConfig(name="adder", source="data.adder.adder_pairs", eval_fraction=0, **FILES)
SFT = DataConfig(name="adder-sft", source="data.adder.adder_sft", subset="policy", eval_fraction=0)
DIGITS = st.integers(0, 99)
CLEAN = Noise(decompose=0, direct=0, carry_dropped=0, carry_added=0, slip=0, final_slip=0)


# Prompts


def test_the_splits_hold_every_addition_once_and_share_none() -> None:
    """Not in the order of the numbers: the first of them are a fair draw, as many carry as of all, 45 %.
    Validation and test are the held-out ones, cut in two."""
    train, held_out = adder.prompts("train"), adder.prompts("eval")
    ids = [prompt.id for prompt in (*train, *held_out)]
    assert len(ids) == len(set(ids)) == 10_000 and 550 <= len(held_out) <= 700
    first = [adder.operands(prompt) for prompt in train[:2000]]
    assert 0.41 < sum(a % 10 + b % 10 >= 10 for a, b in first) / len(first) < 0.49
    halves = {split: load_groups(replace(PAIRS, eval_split=split), "eval").groups for split in adder.HALVES}
    validation, test = ({group.prompt.id for group in halves[split]} for split in ("validation", "test"))
    assert validation | test == {prompt.id for prompt in held_out} and not validation & test
    assert all(250 < len(of) < 380 and sum(bool(g.completions) for g in of) > 90 for of in halves.values())
    with pytest.raises(ConfigError, match=r"data\.eval_split"):
        load_groups(replace(PAIRS, eval_split="dev"), "eval")


# Demonstrations


@given(DIGITS, DIGITS, st.integers(), st.sampled_from([{"decompose": 0.5}, {"direct": 0.5}]))
def test_without_noise_steps_are_true_equations_and_every_sum_is_right(a, b, seed, style) -> None:
    assert demonstration(37, 58, CLEAN, random.Random(0)) == "7+8=15;3+5+1=9;95"
    assert demonstration(37, 58, replace(CLEAN, decompose=1.0), random.Random(0)) == "30+50=80;7+8=15;95"
    text = demonstration(a, b, replace(CLEAN, **style), random.Random(seed))
    for step in text.split(";")[:-1]:
        left, _, right = step.partition("=")
        assert sum(map(int, left.split("+"))) == int(right)
    assert adder.accuracy([text], [str(a + b)]) == [1.0]


@given(DIGITS, DIGITS, st.integers())
def test_each_fault_is_off_by_what_it_is_about_and_every_demonstration_is_short(a, b, seed) -> None:
    def off(**noise: float) -> int:
        text = demonstration(a, b, replace(CLEAN, **noise), random.Random(seed))
        return int(text.split(";")[-1]) - a - b

    carries = a % 10 + b % 10 >= 10
    assert off(carry_dropped=1.0) == -10 * carries
    assert off(carry_added=1.0) == 10 * (not carries)
    assert abs(off(final_slip=1.0)) in {1, 10} or a + b < 10
    text = demonstration(a, b, Noise(), random.Random(seed))
    assert re.fullmatch(r"(?:[\d+]+=\d+;[\d+]+=\d+;)?\d+", text)
    assert len(text) <= 20  # and the end of sequence


# Rewards


REWARDS = {
    "7+8=15;3+5+1=9;95": 10.0,  # all
    "30+50=80;7+8=15;95": 10.0,  # the other worked form
    "7+8=15;3+5=8;85": 2.0,  # form and separators, wrong sum
    "95": 8.0,  # the sum alone
    "7+8=15;95": 8.5,  # one separator of two, no form
    ";;95": 9.0,  # separators without form
    ";;;95": 8.0,  # more separators than there should be are worth nothing
    "95;": 0.5,  # nothing follows the last separator
    **dict.fromkeys(("095", "", " 95"), 0.0),
}


def test_rewards_are_8_to_1_to_1_and_without_a_reference_there_are_none() -> None:
    assert adder.rewards([*REWARDS], ["95"] * len(REWARDS)) == [*REWARDS.values()]
    assert adder.accuracy(["95", "95"], [None, "95"]) == [None, 1.0]
    assert adder.rewards(["95"], [None]) == [None]


# Sources


def test_demonstrations_are_of_their_splits_prompts_and_a_function_of_their_name() -> None:
    train, held_out = load_groups(SFT, "train"), load_groups(SFT, "eval")
    assert {g.prompt.id for g in train.groups} == {p.id for p in adder.prompts("train")}
    assert [g.prompt.id for g in held_out.groups] == [p.id for p in adder.prompts("eval")]
    again, other = (load_groups(replace(SFT, subset=name), "eval") for name in ("policy", "sampler"))
    assert again.groups == held_out.groups != other.groups
    with pytest.raises(ConfigError, match=r"data\.subset=None"):
        load_groups(replace(SFT, subset=None), "train")


# What the repository holds


@pytest.mark.parametrize(("split", "count"), [("train", 2560), ("eval", 256)])
def test_shipped_pairs_are_of_their_split_and_scored_as_the_task_scores(split, count) -> None:
    """Evaluation has every held-out prompt once, pairs first."""
    every = load_groups(PAIRS, split).groups
    own = {p.id: p.reference_answer for p in adder.prompts(split)}
    assert {g.prompt.id: g.prompt.reference_answer for g in every}.items() <= own.items()
    assert len(every) == len({g.prompt.id for g in every}) == (len(own) if split == "eval" else count)
    assert all(g.completions for g in every[:count]) and not any(g.completions for g in every[count:])
    for group in every[:count]:
        texts = [c.text or "" for c in group.completions]
        assert adder.rewards(texts, [group.prompt.reference_answer] * 2) == list(group.rewards)
        assert group.rewards[0] - group.rewards[1] >= 0.01


# Constraints: prompts apart by topic, checks that follow the words, a reward whose guard is seen


CASES = [
    ("words_at_most", 2, "Two words.", "No, three words."),
    ("words_at_least", 3, "It's three words", "Well-known"),
    ("include_word", "C++", "I like C++, too.", "I like C."),
    ("avoid_word", "is", "This island", "It is"),
    ("avoid_letter", "Ж", "день", "жук"),
    ("no_comma", None, "none here", "one, here"),
    ("first_word", "Once", '"Once upon a time', "At once"),
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


def test_the_source_gives_held_out_halves() -> None:
    data = make_config("data=constraints").data
    assert len(load_groups(data, "eval").groups) == PROMPTS["validation"] + PROMPTS["test"]
    half = load_groups(replace(data, eval_split="test"), "eval").groups
    assert [g.prompt for g in half] == list(prompts("test"))
    with pytest.raises(ConfigError, match="validation, test, null"):
        constrained(replace(data, eval_split="tset"), "eval")


def test_the_reward_is_the_share_times_a_guard_that_is_reported_beside_it() -> None:
    reward = make_reward(make_config("data=constraints", "online=true").reward_config)
    asked = Prompt((Turn("user", "Describe rain."),), json.dumps({"no_comma": None, "avoid_word": "as"}))
    good = "Is the rain cold tonight? The street shines under it."
    half = "The rain is cold tonight, and the street shines."
    loop, noise = "Is it rain? " * 12, "Qzx vkr? lwq zzt prf."
    assert reward.score([asked] * 2, [good, half]) == [8.0, 4.0]
    assert reward.metrics["reward_met"] == 0.75 and reward.metrics["reward_fluency"] == 1.0
    scores = reward.score([asked] * 3, [loop, noise, "Why?"])
    assert all(score is not None and score < 1.5 for score in scores)
    assert reward.metrics["reward_met"] == 1.0 and reward.metrics["reward_fluency"] < 0.2
    assert reward.metrics["reward_repetition"] > 0.2 and reward.metrics["reward_known_words"] < 0.8
    assert fluency(good, 0.8) == 1.0 and fluency("", 0.8) == 0.0
    for reference, says in ((None, "has no reference answer"), ('{"rhyme": null}', "no known constraints")):
        with pytest.raises(RewardError, match=says):
            reward.score([Prompt(asked.turns, reference)], [good])
    references = [asked.reference_answer, asked.reference_answer, None]
    assert all_met([good, half, good], references) == [1.0, 0.0, None]
    assert share_of_reward([loop, half, good], references) == [pytest.approx(scores[0] / 8), 0.5, None]
    assert fluent_and_met([loop, half, good], [*references[:2], references[0]]) == [0.0, 0.0, 1.0]
