"""The embedded instructions: the language, its authors, what stories are worth, the sources."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from common.errors import ConfigError, DataError
from data import instruct
from data.groups import write_groups
from data.sources import load_groups, load_splits
from data.stories import Language, error, read_language
from data.types import Group
from data.views import best_and_worst
from tests.other_language import OTHER, kitchen, write_other
from tests.tiny import ROOT, make_config
from tools.make_instruct import blank

ASSETS = ROOT / "assets" / "instruct"
LANGUAGE = instruct.embedded()
DATA = make_config("model=instruct", "data=instruct").data
KITCHEN = kitchen()
WRITERS = [*LANGUAGE.authors, *LANGUAGE.mixtures]


@pytest.fixture
def other(tmp_path: Path) -> Path:
    return write_other(tmp_path / "kitchen.yaml")


def flawless(language: Language) -> Language:
    """The language with authors who make no mistake."""
    right = {
        name: replace(a, obeys=1.0, broken=0.0, counts=1.0, closes=1.0, repeats=0.0)
        for name, a in language.authors.items()
    }
    return replace(language, authors=right)


# Prompts


def test_the_splits_hold_every_prompt_once_and_share_none() -> None:
    parts = [instruct.prompts(LANGUAGE, split) for split in ("train", "validation", "test")]
    ids = [prompt.id for part in parts for prompt in part]
    assert len(ids) == len(set(ids)) == LANGUAGE.prompts == 96_000
    assert [len(part) for part in parts[1:]] == [384, 384]
    assert instruct.prompts(LANGUAGE, "eval") == parts[1] + parts[2]


def test_prompts_come_in_an_order_that_is_not_that_of_the_words() -> None:
    first = [LANGUAGE.asked(instruct.text_of(p)) for p in instruct.prompts(LANGUAGE, "train", 2000)]
    for count in LANGUAGE.counts.values():
        assert 0.29 < sum(a.count == count for a in first) / 2000 < 0.38
    for hero in LANGUAGE.slots["HERO"]:
        assert 0.03 < sum(a.words["HERO"] == hero for a in first) / 2000 < 0.07


# Stories and what they are worth


@given(st.integers(0, LANGUAGE.prompts - 1), st.sampled_from(sorted(LANGUAGE.authors)), st.integers())
def test_who_makes_no_mistake_gets_every_part_that_the_sentences_offer(
    number: int, author: str, seed: int
) -> None:
    language = flawless(LANGUAGE)
    prompt = language.prompt(number)
    story = language.story(prompt, author, random.Random(seed))
    found = language.parts(prompt, story)
    mentioned = set(story.split())
    for slot, word in language.asked(prompt).words.items():
        assert found[slot] == float(word in mentioned)
    assert (found["count"], found["grammar"], found["closing"]) == (1.0, 1.0, 1.0)
    assert found["tone"] == float(any(word in language.tone_of for word in mentioned))
    assert 0 < found["variety"] <= 1


PROMPT = "happy fox forest key three"
BEST = "the glad fox ran to the forest . the fox took a merry key . gladly the fox saw the key . the end ."


@pytest.mark.parametrize(
    ("story", "lost"),
    [
        (BEST, {}),
        (BEST.replace("a merry key", "a grim key"), {"tone": 1 / 3}),
        (BEST.replace("took a merry key", "took a merry book"), {"OBJECT": 1 / 2}),
        (BEST.replace("to the forest", "to the city"), {"PLACE": 1}),
        (BEST.replace("glad fox ran", "glad bear ran"), {"HERO": 1 / 3}),
        (BEST.replace("the glad fox ran", "glad the fox ran"), {"grammar": 1 / 3}),
        (BEST.removesuffix(" the end ."), {"closing": 1}),
        (BEST.removesuffix(" . the end .") + " the end .", {"grammar": 1}),
        (BEST.replace(" gladly the fox saw the key .", ""), {"count": 1 / 2}),
        (BEST.replace("the fox took a merry key . ", "") + "", {"count": 1 / 2}),
        (BEST.removesuffix(" . the end ."), {"closing": 1, "grammar": 1}),
        ("the end .", dict.fromkeys(LANGUAGE.reward, 1)),
        ("", dict.fromkeys(LANGUAGE.reward, 1)),
    ],
)
def test_each_fault_costs_its_share_of_its_part(story: str, lost: dict[str, float]) -> None:
    worth = {name: points * (1 - lost.get(name, 0)) for name, points in LANGUAGE.reward.items()}
    assert LANGUAGE.score(PROMPT, story) == pytest.approx(sum(worth.values()), abs=1e-4)


def test_a_sentence_said_twice_costs_variety() -> None:
    twice = BEST.replace("gladly the fox saw the key", "the fox took a merry key")
    assert LANGUAGE.score(PROMPT, twice) == pytest.approx(10 - 0.5 / 3, abs=1e-4)


@given(st.text(max_size=60) | st.lists(st.sampled_from(LANGUAGE.vocabulary)).map(" ".join))
def test_any_text_has_a_reward_within_bounds(story: str) -> None:
    assert 0 <= LANGUAGE.score(PROMPT, story) <= 10
    assert instruct.graded([story], [PROMPT]) == [LANGUAGE.score(PROMPT, story) / 10]


@given(st.text(max_size=40))
def test_what_is_no_prompt_has_no_verdict(text: str) -> None:
    if text not in {LANGUAGE.prompt(i) for i in range(3)}:
        assert instruct.graded([BEST], [text]) == [None]
    assert instruct.graded([BEST], [None]) == [None]


def test_authors_are_as_good_as_their_care() -> None:
    def worth(author: str) -> float:
        asked = instruct.prompts(LANGUAGE, "validation")
        stories = [instruct.candidates(LANGUAGE, p, [author])[0].text or "" for p in asked]
        return sum(LANGUAGE.score(instruct.text_of(p), s) for p, s in zip(asked, stories, strict=True)) / len(
            asked
        )

    order = ["strong", "careful", "brisk", "fine", "quick", "half", "sloppy", "bad"]
    found = [worth(author) for author in order]
    assert found == sorted(found, reverse=True)
    assert worth("bad") < worth("base") < worth("half")


@pytest.mark.parametrize("author", WRITERS)
def test_every_story_fits_the_models_lengths_and_its_words(author: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(ASSETS / "model")
    for prompt in instruct.prompts(LANGUAGE, "train", 200):
        story = instruct.candidates(LANGUAGE, prompt, [author])[0].text or ""
        ids = tokenizer(story)["input_ids"]
        assert len(ids) == len(story.split()) < 56
        assert tokenizer.unk_token_id not in ids
        assert tokenizer.decode(ids) == story


# The judge that errs


def test_a_judges_error_belongs_to_the_story_and_has_its_spread() -> None:
    stories = [LANGUAGE.story(PROMPT, "half", random.Random(i)) for i in range(3000)]
    drawn = {story: error(PROMPT, story, 3.0, 0.0) for story in stories}
    assert all(error(PROMPT, story, 3.0, 0.0) == e for story, e in drawn.items())
    values = list(drawn.values())
    mean = sum(values) / len(values)
    assert abs(mean) < 0.25
    assert 2.85 < (sum((v - mean) ** 2 for v in values) / len(values)) ** 0.5 < 3.15
    assert error("sad fox forest key three", BEST, 3.0, 0.0) != error(PROMPT, BEST, 3.0, 0.0)
    assert error(PROMPT, BEST, 0.0, 0.0) == 0.0
    assert error(PROMPT, BEST, 0.0, 0.25) == pytest.approx(0.25 * len(BEST.split()))


# Sources


@pytest.mark.parametrize(("noise", "low", "high"), [(0.0, 1.0, 1.0), (1.5, 0.88, 0.95), (3.0, 0.78, 0.85)])
def test_pairs_are_the_judges_best_and_worst(noise: float, low: float, high: float) -> None:
    assert DATA.instruct is not None
    own = replace(DATA.instruct, noise=noise, prompts=1000)
    groups = load_groups(replace(DATA, instruct=own), "train").groups
    right = 0
    for group in groups:
        asked = instruct.text_of(group.prompt)
        written = instruct.candidates(LANGUAGE, group.prompt, own.authors)
        judge = [LANGUAGE.score(asked, c.text or "") + error(asked, c.text or "", noise, 0) for c in written]
        ends = best_and_worst(Group(group.prompt, tuple(written), tuple(judge)))
        assert ends is not None
        assert [c.text for c in group.completions] == [written[i].text for i in ends]
        assert group.rewards == tuple(judge[i] for i in ends)
        best, worst = (LANGUAGE.score(asked, c.text or "") for c in group.completions)
        right += best > worst
    assert low <= right / len(groups) <= high


def test_training_prompts_are_a_beginning_of_more_of_them_and_none_is_held_out() -> None:
    assert DATA.instruct is not None
    few, more = (
        load_groups(replace(DATA, instruct=replace(DATA.instruct, prompts=n)), "train").groups
        for n in (50, 100)
    )
    assert more[:50] == few
    held = {
        halves: load_groups(replace(DATA, eval_split=halves), "eval").groups for halves in instruct.HALVES
    }
    ids = {name: {group.prompt.id for group in groups} for name, groups in held.items()}
    assert not ids["validation"] & ids["test"]
    assert not {group.prompt.id for group in more} & (ids["validation"] | ids["test"])
    assert len(load_groups(DATA, "eval").groups) == 768


def test_a_share_of_the_answers_may_be_the_models_own(tmp_path: Path) -> None:
    asked = instruct.prompts(LANGUAGE, "train", 8)
    mine = [
        Group(p, tuple(instruct.candidates(LANGUAGE, p, ["bad", "careful"])), (0.0, 0.0)) for p in asked[:4]
    ]
    write_groups(tmp_path / "own.jsonl", mine)
    assert DATA.instruct is not None
    own = replace(DATA.instruct, prompts=8, noise=0.0, own=str(tmp_path / "own.jsonl"), own_share=0.5)
    groups = load_groups(replace(DATA, instruct=own), "train").groups
    for i, group in enumerate(groups):
        authors = ["bad", "careful"] if i < 4 else own.authors
        known = {c.text for c in instruct.candidates(LANGUAGE, group.prompt, authors)}
        assert group.completions and {c.text for c in group.completions} <= known
    with pytest.raises(DataError, match=r"has not two answers to .*own_share=0.75"):
        load_groups(replace(DATA, instruct=replace(own, own_share=0.75)), "train")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["data.instruct.authors=[fine,nobody]"], r"data.instruct.authors=nobody: is none of strong"),
        (["data.instruct.authors=[fine]"], r"data.instruct.authors=.*two authors"),
        (["data.instruct.noise=-1"], r"data.instruct.noise=-1"),
        (["data.instruct.noise=nan"], r"data.instruct.noise=nan"),
        (["data.instruct.length_bias=inf"], r"data.instruct.length_bias=inf"),
        (["data.instruct.own_share=0.5"], r"data.instruct.own=None: name the groups file"),
        (["data.instruct.own=own.jsonl"], r"data.instruct.own_share=0.0: nothing would read .*own.jsonl"),
        (["data.instruct.prompts=100000"], r"data.instruct.prompts=100000: this language has 95232"),
        (["data.instruct.language=nowhere.yaml"], r"data.instruct.language=nowhere.yaml: is no language"),
        (["data.eval_split=dev"], r"data.eval_split=dev: must be validation or test"),
        (["data=instruct-sft", "loss=sft", "data.subset=nobody"], r"data.subset=nobody: name an author"),
    ],
)
def test_settings_that_cannot_be_honoured_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_splits(make_config("model=instruct", "data=instruct", *words).data)


def test_demonstrations_are_one_to_each_prompt_by_the_author_that_was_named(monkeypatch) -> None:
    monkeypatch.setattr(instruct, "prompts", lambda language, split: instruct_first(split))
    data = make_config("model=instruct-init", "data=instruct-sft", "loss=sft", "data.subset=strong").data
    groups = load_groups(data, "train").groups
    assert [g.prompt for g in groups] == list(instruct_first("train"))
    for group in groups:
        assert group.completions == tuple(instruct.candidates(LANGUAGE, group.prompt, ["strong"]))


def instruct_first(split: str):
    return instruct.story_prompt(LANGUAGE.prompt(5)), instruct.story_prompt(LANGUAGE.prompt(7))


# Another language


@settings(max_examples=25)
@given(st.integers(0, 2 * 3 * 4 * 2 - 1), st.sampled_from(["chef", "guest", "table"]), st.integers())
def test_another_language_goes_through_the_same_code(number: int, author: str, seed: int) -> None:
    language = KITCHEN
    prompt = language.prompt(number)
    story = language.story(prompt, author, random.Random(seed))
    assert set(story.split()) <= set(language.vocabulary)
    assert 0 <= language.score(prompt, story) <= 10
    assert (
        flawless(language).parts(prompt, flawless(language).story(prompt, "chef", random.Random(seed)))[
            "grammar"
        ]
        == 1.0
    )


def test_another_languages_data_and_judge(other: Path, tmp_path: Path) -> None:
    own = (
        f"data.instruct.language={other}",
        "data.instruct.authors=[chef,guest]",
        "data.instruct.prompts=20",
    )
    data = make_config("model=instruct", "data=instruct", *own).data
    groups = load_groups(data, "train").groups
    assert len(groups) == 20 and any(group.completions for group in groups)
    language = read_language(str(other))
    blank(language, tmp_path / "blank")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "blank")
    assert tokenizer("hot ann soup two")["input_ids"] == [6, 10, 13, 9]
    assert instruct.grader(lambda: language)(["ann cooked a spicy soup . enjoy ."], ["hot ann soup one"]) == [
        1.0
    ]


def author(**change):
    return {"authors": OTHER["authors"] | {"chef": OTHER["authors"]["chef"] | change}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"counts": None}, "is no language"),
        ({"slots": {"COOK": ["ann", "soup"], "DISH": ["soup"]}}, "soup stand twice"),
        ({"reward": {"tone": 1}}, "reward must have the parts"),
        ({"sentences": {"dish": "COOK MAKE it"}}, "writes how, which are no sentences"),
        ({"mixtures": {"table": {"nobody": 1}}}, "nobody, who are no authors"),
        ({"words": {"MAKE": [["cooked"]]}}, "weights of dialects"),
        ({"extra": 1}, "extra, which nothing reads"),
        ({"slots": {"COOK": ["ann bob"], "DISH": ["soup"]}}, "'ann bob' is not one word"),
        ({"slots": {"COOK": [], "DISH": ["soup"]}}, "a list of words is empty"),
        ({"slots": {"COOK": ["ann"], "DISH": ["soup"], "tone": ["x"]}}, "reward must have the parts"),
        ({"favourites": 0}, "favourites must be at least 1"),
        ({"counts": {"none": 0}}, "at least one sentence"),
        ({"words": {"MAKE": [[], ["served"]]}}, "a list of words is empty"),
        ({"sentences": {"dish": "", "how": "ADV COOK"}}, "sentence dish has no word"),
        ({"closing": ""}, "its closing has no word"),
        ({"mixtures": {"table": {"chef": -1, "guest": 2}}}, "mixture table must have weights"),
        ({"mixtures": {"chef": {"guest": 1}}}, "mixture chef has the name of an author"),
        ({"reward": dict.fromkeys(OTHER["reward"], 0)}, "its reward has no points"),
        (author(obeys="often"), "could not convert"),
        (author(closes=2), "closes of author chef is 2, and a probability"),
        (author(dialect=[0, 0]), "the dialect of author chef must have weights"),
        (author(sentences={}), "the sentences of author chef must have weights"),
        (author(sentences={"dish": float("nan")}), "the sentences of author chef must have weights"),
    ],
)
def test_a_file_that_is_no_language_is_refused(change, message: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(yaml.safe_dump({**OTHER, **change}))
    with pytest.raises(ConfigError, match=f"data.instruct.language={path}: .*{message}"):
        read_language(str(path))


# What the repository holds


def test_the_shipped_tokenizer_and_architecture_are_what_the_code_makes(tmp_path: Path) -> None:
    blank(LANGUAGE, tmp_path)
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (tmp_path / name).read_text() == (ASSETS / "model" / name).read_text()


def test_the_shipped_model_is_small_and_loads_unchanged() -> None:
    model = AutoModelForCausalLM.from_pretrained(ASSETS / "model")
    assert 3e5 < sum(p.numel() for p in model.parameters()) < 1e6
    assert sum(path.stat().st_size for path in (ASSETS / "model").iterdir()) < 4e6


def test_the_shipped_models_page_names_no_folder_of_a_machine_and_no_uncommitted_code() -> None:
    page = (ASSETS / "model" / "README.md").read_text(encoding="utf-8")
    assert "train.py" in page and "+changes" not in page
    assert re.findall(r"(?<![\w.~:/<])/\w+/", page) == []
