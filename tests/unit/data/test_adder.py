"""The embedded task: its generator, its rewards, its sources, and the assets that the repository holds."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from common.errors import ConfigError
from config.schema_data import DataConfig
from data import adder
from data.adder import Noise, addition, demonstration
from data.chat import make_renderer
from data.sources import load_groups
from data.types import Completion, Prompt, Turn
from tests.tiny import ROOT, make_config
from tools.make_adder import blank

ASSETS = ROOT / "assets" / "adder"
PAIRS = DataConfig(
    name="adder",
    source="data.adder.adder_pairs",
    path=str(ASSETS / "pairs.jsonl"),
    eval_path=str(ASSETS / "eval_pairs.jsonl"),
    eval_fraction=0,
)
SFT = DataConfig(name="adder-sft", source="data.adder.adder_sft", subset="policy", eval_fraction=0)
DIGITS = st.integers(0, 99)
CLEAN = Noise(decompose=0, direct=0, carry_dropped=0, carry_added=0, slip=0, final_slip=0)


def verdict(a: int, b: int, text: str) -> float:
    found = adder.accuracy([text], [str(a + b)])[0]
    assert found is not None
    return found


# Prompts


def test_the_splits_hold_every_addition_once_and_share_none() -> None:
    train, held_out = adder.prompts("train"), adder.prompts("eval")
    ids = [prompt.id for prompt in (*train, *held_out)]
    assert len(ids) == len(set(ids)) == 10_000
    assert 550 <= len(held_out) <= 700


def test_prompts_are_not_in_the_order_of_the_numbers() -> None:
    """The first of them are a fair draw: as many carry as of all, 45 %."""
    first = [adder.operands(prompt) for prompt in adder.prompts("train")[:2000]]
    assert 0.41 < sum(a % 10 + b % 10 >= 10 for a, b in first) / len(first) < 0.49


# Demonstrations


@pytest.mark.parametrize("style", [{}, {"decompose": 1.0}, {"direct": 1.0}])
def test_without_noise_every_sum_is_right(style: dict[str, float]) -> None:
    noise, rng = replace(CLEAN, **style), random.Random(0)
    assert all(verdict(a, b, demonstration(a, b, noise, rng)) == 1.0 for a in range(100) for b in range(100))


def test_the_two_worked_forms() -> None:
    assert demonstration(37, 58, CLEAN, random.Random(0)) == "7+8=15;3+5+1=9;95"
    assert demonstration(37, 58, replace(CLEAN, decompose=1.0), random.Random(0)) == "30+50=80;7+8=15;95"
    assert demonstration(3, 4, CLEAN, random.Random(0)) == "3+4=7;0+0=0;7"


@given(DIGITS, DIGITS, st.integers())
def test_steps_without_noise_are_true_equations(a: int, b: int, seed: int) -> None:
    text = demonstration(a, b, replace(CLEAN, decompose=0.5), random.Random(seed))
    for step in text.split(";")[:-1]:
        left, _, right = step.partition("=")
        assert sum(map(int, left.split("+"))) == int(right)


@given(DIGITS, DIGITS, st.integers())
def test_each_fault_is_off_by_what_it_is_about(a: int, b: int, seed: int) -> None:
    def off(**noise: float) -> int:
        text = demonstration(a, b, replace(CLEAN, **noise), random.Random(seed))
        return int(text.split(";")[-1]) - a - b

    carries = a % 10 + b % 10 >= 10
    assert off(carry_dropped=1.0) == -10 * carries
    assert off(carry_added=1.0) == 10 * (not carries)
    assert abs(off(final_slip=1.0)) in {1, 10} or a + b < 10


@given(DIGITS, DIGITS, st.integers())
def test_every_demonstration_is_in_form_and_short(a: int, b: int, seed: int) -> None:
    text = demonstration(a, b, Noise(), random.Random(seed))
    assert re.fullmatch(r"(?:[\d+]+=\d+;[\d+]+=\d+;)?\d+", text)
    assert len(text) <= 20  # and the end of sequence


def test_noise_leaves_room_both_ways() -> None:
    """Measured against the probabilities: right if the carry is and nothing slips, or if one of the two slips
    makes up for it."""
    right: dict[bool, list[float]] = {True: [], False: []}
    for group in adder.demonstrations("train", "test", 2, Noise()):
        a, b = adder.operands(group.prompt)
        right[a % 10 + b % 10 >= 10].append(verdict(a, b, group.completions[0].text or ""))
    no_slip, mended = 0.88 * 0.88, 2 * 0.88 * 0.12 / 4
    assert sum(right[True]) / len(right[True]) == pytest.approx(0.2 * no_slip + 0.8 * mended, abs=0.015)
    assert sum(right[False]) / len(right[False]) == pytest.approx(0.8 * no_slip + 0.2 * mended, abs=0.015)


# Rewards


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("7+8=15;3+5+1=9;95", 10.0),  # all
        ("30+50=80;7+8=15;95", 10.0),  # the other worked form
        ("7+8=15;3+5=8;85", 2.0),  # form and separators, wrong sum
        ("95", 8.0),  # the sum alone
        ("7+8=15;95", 8.5),  # one separator of two, no form
        (";;95", 9.0),  # separators without form
        (";;;95", 8.0),  # more separators than there should be are worth nothing
        ("95;", 0.5),  # nothing follows the last separator
        ("095", 0.0),
        ("", 0.0),
        (" 95", 0.0),
    ],
)
def test_rewards_are_8_to_1_to_1(text: str, reward: float) -> None:
    assert adder.rewards([text], ["95"]) == [reward]


def test_without_a_reference_there_is_no_verdict() -> None:
    assert adder.accuracy(["95", "95"], [None, "95"]) == [None, 1.0]
    assert adder.rewards(["95"], [None]) == [None]


# Sources


def test_demonstrations_are_of_their_splits_prompts_and_a_function_of_their_name() -> None:
    train, held_out = load_groups(SFT, "train"), load_groups(SFT, "eval")
    assert {g.prompt.id for g in train.groups} == {p.id for p in adder.prompts("train")}
    assert [g.prompt.id for g in held_out.groups] == [p.id for p in adder.prompts("eval")]
    again, other = (load_groups(replace(SFT, subset=name), "eval") for name in ("policy", "sampler"))
    assert again.groups == held_out.groups != other.groups


def test_a_source_without_a_name_or_a_file_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"data\.subset=None"):
        load_groups(replace(SFT, subset=None), "train")
    for split, key in (("train", "path"), ("eval", "eval_path")):
        with pytest.raises(ConfigError, match=rf"data\.{key}"):
            adder.adder_pairs(replace(PAIRS, **{key: None}), split)


# What the repository holds


@pytest.mark.parametrize(("split", "count"), [("train", 2560), ("eval", 256)])
def test_shipped_pairs_are_of_their_split_and_scored_as_the_task_scores(
    split: Literal["train", "eval"], count: int
) -> None:
    groups = [g for g in load_groups(PAIRS, split).groups if g.completions]
    assert len(groups) == len({g.prompt.id for g in groups}) == count
    own = {p.id: p for p in adder.prompts(split)}
    for group in groups:
        assert group.prompt.reference_answer == own[group.prompt.id].reference_answer
        assert adder.rewards(
            [c.text or "" for c in group.completions], [group.prompt.reference_answer] * 2
        ) == list(group.rewards)
        assert group.rewards[0] - group.rewards[1] >= 0.01


def test_evaluation_has_every_held_out_prompt_once_pairs_first() -> None:
    groups = load_groups(PAIRS, "eval").groups
    assert sorted(g.prompt.id for g in groups) == sorted(p.id for p in adder.prompts("eval"))
    assert all(g.completions for g in groups[:256])
    assert not any(g.completions for g in groups[256:])
    assert all(g.prompt.reference_answer is not None for g in groups)


def test_the_shipped_tokenizer_and_architecture_are_what_the_code_makes(tmp_path: Path) -> None:
    blank(tmp_path)
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (tmp_path / name).read_text() == (ASSETS / "model" / name).read_text()
    made, shipped = (
        json.loads((folder / "config.json").read_text()) for folder in (tmp_path, ASSETS / "model")
    )
    assert made | {"transformers_version": None} == shipped | {"transformers_version": None}


def test_the_shipped_models_page_names_no_folder_of_a_machine_and_no_uncommitted_code() -> None:
    page = (ASSETS / "model" / "README.md").read_text(encoding="utf-8")
    assert "train.py" in page and "+changes" not in page
    assert re.findall(r"(?<![\w.~:/<])/\w+/", page) == []


def test_the_shipped_model_is_small_and_loads_unchanged() -> None:
    model = AutoModelForCausalLM.from_pretrained(ASSETS / "model")
    assert 3e5 < sum(p.numel() for p in model.parameters()) < 1e6
    assert sum(path.stat().st_size for path in (ASSETS / "model").iterdir()) < 4e6
    assert sum(path.stat().st_size for path in ASSETS.glob("*.jsonl")) < 2e6


def test_the_tokenizer_writes_one_token_a_character_and_reads_it_back() -> None:
    tokenizer = AutoTokenizer.from_pretrained(ASSETS / "model")
    text = "0123456789+=;"
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer("x\n")["input_ids"] == [tokenizer.unk_token_id] * 2


def test_rows_have_one_beginning_and_one_end() -> None:
    config = make_config("model=adder", "data=adder", "model.max_prompt_length=32")
    tokenizer = AutoTokenizer.from_pretrained(ASSETS / "model")
    renderer = make_renderer(tokenizer, config.model, config.data)
    prompt = addition(37, 58)
    row = renderer.sequence(prompt, Completion(text="7+8=15;3+5+1=9;95"))
    assert not isinstance(row, str)
    assert tokenizer.decode(row.prompt_ids) == "<bos><user>37+58=<assistant>"
    assert tokenizer.decode(row.completion_ids) == "7+8=15;3+5+1=9;95<eos>"
    assert renderer.stop_token_ids == (tokenizer.eos_token_id,)
    asked_again = Prompt((*prompt.turns, Turn("assistant", "95"), Turn("user", "01+02=")))
    assert tokenizer.decode(renderer.prompt_ids(asked_again)[-9:]) == "<eos><user>01+02=<assistant>"


@pytest.mark.parametrize(("model", "data"), [("adder", "adder"), ("adder-init", "adder-sft")])
def test_shipped_settings_leave_room_for_every_answer(model: str, data: str) -> None:
    config = make_config(f"model={model}", f"data={data}", "loss=sft")
    assert config.data.verifier == "data.adder.accuracy"
    assert config.model.max_prompt_length >= 9
    assert config.model.max_length - config.model.max_prompt_length >= 21
    assert config.model.from_config == (model == "adder-init")


def test_validation_and_test_are_the_held_out_prompts_cut_in_two() -> None:
    halves = {split: load_groups(replace(PAIRS, eval_split=split), "eval").groups for split in adder.HALVES}
    ids = {split: {group.prompt.id for group in groups} for split, groups in halves.items()}
    assert ids["validation"] | ids["test"] == {prompt.id for prompt in adder.prompts("eval")}
    assert not ids["validation"] & ids["test"]
    assert all(
        250 < len(found) < 380 and sum(bool(g.completions) for g in halves[split]) > 90
        for split, found in ids.items()
    )
    with pytest.raises(ConfigError, match=r"data\.eval_split"):
        load_groups(replace(PAIRS, eval_split="dev"), "eval")
