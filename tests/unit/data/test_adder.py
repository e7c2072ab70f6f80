"""The embedded task: its generator, its rewards, its sources, and the assets that the repository holds."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from common.errors import ConfigError
from config.schema_data import DataConfig
from data import adder
from data.adder import Noise, addition, demonstration
from data.chat import make_renderer
from data.sources import load_groups
from data.types import Completion, Prompt, Turn
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


def test_the_two_worked_forms() -> None:
    assert demonstration(37, 58, CLEAN, random.Random(0)) == "7+8=15;3+5+1=9;95"
    assert demonstration(37, 58, replace(CLEAN, decompose=1.0), random.Random(0)) == "30+50=80;7+8=15;95"
    assert demonstration(3, 4, CLEAN, random.Random(0)) == "3+4=7;0+0=0;7"
    assert demonstration(3, 4, replace(CLEAN, direct=1.0), random.Random(0)) == "7"


@given(DIGITS, DIGITS, st.integers(), st.sampled_from([{"decompose": 0.5}, {"direct": 0.5}]))
def test_without_noise_steps_are_true_equations_and_every_sum_is_right(a, b, seed, style) -> None:
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
    for split, key in (("train", "path"), ("eval", "eval_path")):
        with pytest.raises(ConfigError, match=rf"data\.{key}"):
            adder.adder_pairs(replace(PAIRS, **{key: None}), split)


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


def test_rows_have_one_beginning_one_end_and_a_token_a_character() -> None:
    config = make_config("model=adder", "data=adder", "model.max_prompt_length=32")
    tokenizer = AutoTokenizer.from_pretrained(ASSETS / "model")
    renderer, prompt = make_renderer(tokenizer, config.model, config.data), addition(37, 58)
    row = renderer.sequence(prompt, Completion(text="7+8=15;3+5+1=9;95"))
    assert not isinstance(row, str)
    assert (len(row.prompt_ids), len(row.completion_ids)) == (9, 18)
    assert tokenizer.decode(row.prompt_ids) == "<bos><user>37+58=<assistant>"
    assert tokenizer.decode(row.completion_ids) == "7+8=15;3+5+1=9;95<eos>"
    assert renderer.stop_token_ids == (tokenizer.eos_token_id,)
    asked_again = Prompt((*prompt.turns, Turn("assistant", "95"), Turn("user", "01+02=")))
    assert tokenizer.decode(renderer.prompt_ids(asked_again)[-9:]) == "<eos><user>01+02=<assistant>"
