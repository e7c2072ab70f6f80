"""Dialogues that are written as texts are read into the turns that they came from, whatever their headings;
texts in a chat template's markup are refused; nothing else is touched."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from config.schema_data import DataConfig
from data.markup import Reader, repeats_prompt
from data.rows import Row
from data.types import Completion, Group, Prompt, Turn
from tests.unit.data.people import load

CONFIG = DataConfig(name="t", source="-")
WORDS = st.text(st.characters(categories=("Ll", "N"), include_characters=" .,?!"), min_size=1).filter(
    lambda text: text == text.strip()
)
HEADINGS = [
    "\n\nHuman: {}\n\nAssistant: {}",
    "User: {}\nAssistant: {}\n",
    "### Instruction:\n{}\n\n### Response:\n{}\n\n",
    "USER: {} ASSISTANT: {} ",
    "prompter: {}\nassistant: {}\n",
    "Frage: {}\nAntwort: {}\n",
    "顾客： {}\n客服： {}\n",
]


def one(prompt: str, *answers: str) -> Group:
    rewards = tuple(map(float, range(len(answers))))
    return Group(Prompt((Turn("user", prompt),)), tuple(map(Completion, answers)), rewards)


def said(group: Group) -> list[str]:
    return [turn.content for turn in group.prompt.turns]


@pytest.mark.parametrize("form", HEADINGS)
@settings(max_examples=30)
@given(rows=st.lists(st.lists(WORDS, min_size=2, max_size=5), min_size=2, max_size=6))
def test_a_dialogue_is_its_turns_again_whatever_its_headings(form: str, rows: list[list[str]]) -> None:
    """As a prompt that ends behind the answerer's heading, and at the head of two whole dialogues."""
    texts, wanted = [], []
    for i, contents in enumerate(rows):
        *before, last = contents[: (len(contents) - 1) // 2 * 2 + 1]
        pairs = zip(before[::2], before[1::2], strict=True)
        texts.append("".join(form.format(*pair) for pair in pairs) + form.format(f"{last} {i}", "").rstrip())
        wanted.append([*before, f"{last} {i}"])
    pairs = [{"prompt": text, "chosen": " yes", "rejected": " no"} for text in texts]
    whole = [{"chosen": f"{text} i say yes", "rejected": f"{text} i say no"} for text in texts]
    for records, answers in ((pairs, ["yes", "no"]), (whole, ["i say yes", "i say no"])):
        loaded = load(*records)
        assert [said(group) for group in loaded.groups] == wanted
        assert {tuple(c.text for c in group.completions) for group in loaded.groups} == {tuple(answers)}
        assert loaded.format == "hh" or "read as turns" in loaded.read_back[0]
    assert [said(group) for group in load(*pairs, read_markup="off").groups] == [[text] for text in texts]


@pytest.mark.parametrize(
    ("prompts", "read"),
    [
        (["Summarise:\nUser: hi {}\nAssistant: hello", "Who is right in\nUser: a {}\nAssistant: b"], None),
        (["Amy: hi {}\nBob: yes", "Carl: no {}\nDana: oh"], None),
        (["Note: the cat {} is red", "Note: the dog {} is blue"], None),
        (["Context: a {} b\nQuestion: what", "Context: c {} d\nQuestion: why"], None),
        (["User: a {}\nAssistant: b\nUser: c", "User: d {}"], [["a 0", "b", "c"], ["d 1"]]),
        (["Be kind.\n\nUser: a {}\nAssistant:"] * 2, [["Be kind.", "a 0"], ["Be kind.", "a 1"]]),
        (["User: a {}\nNote: x\nAssistant:"] * 2, [["a 0\nNote: x"], ["a 1\nNote: x"]]),
        (["User: a {}\nAssistant: b"] * 2, "'user' and 'assistant' that ends with an answer"),
        (["<|im_start|>user\nHi {}<|im_end|>\n<|im_start|>assistant\n"] * 2, "markup of a chat template"),
        (["<|our|>user\nHi {}<|end|>\n<|our|>assistant\n"] * 2, "markup of a chat template (<|our|>)"),
        (["What does <|im_start|>user {} mean?", "<|im_end|> {} is what?"], None),
    ],
)
def test_what_a_prompt_may_mean(prompts: list[str], read: list | str | None) -> None:
    records = [
        {"prompt": text.format(i), "chosen": "yes", "rejected": "no"} for i, text in enumerate(prompts)
    ]
    if isinstance(read, str):
        assert all(read in dropped.reason for dropped in load(*records).dropped)
        assert load(*records).groups == []
    else:
        assert [said(g) for g in load(*records).groups] == (read or [[r["prompt"]] for r in records])
    assert len(load(*records, apply_chat_template=False).groups) == 2


def read(*groups: Group) -> tuple[list[Group], tuple[str, ...]]:
    """What the groups become, and what is said of it."""
    reader = Reader(CONFIG)
    rows = ((group, Row("f", i, {})) for i, group in enumerate(groups, 1))
    return [group for group, _ in reader.read(rows)], reader.lines


def test_a_prompt_at_the_head_of_every_answer_is_taken_off_and_counted():
    """And a script without spaces is cut behind a sentence, or refused."""
    ends = ("It is a number.", "I do not know.")
    asked = [one(f"What is {i}?", *(f"What is {i}? {end}" for end in ends)) for i in range(70)]
    found, lines = read(*asked)
    assert {tuple(c.text for c in group.completions) for group in found} == {ends}
    assert lines == ("70 rows whose answers began with the prompt, which was taken off (first: f, row 1)",)
    some = [*asked[:9], one("Why?", "Why? Because.", "No.")]
    found, (line,) = read(*some)
    assert found == some, "one answers otherwise"
    assert line.startswith("9 rows whose answers begin with the prompt, as not all do: left so")
    assert not repeats_prompt(one("1", "10"))
    pair = {"chosen": "天空是什么颜色？天空是蓝色。", "rejected": "天空是什么颜色？天空是红色。"}
    (group,) = load(pair).groups
    assert said(group) == ["天空是什么颜色？"] and group.completions[1].text == "天空是红色。"
    short = {key: text.partition("？")[2] for key, text in pair.items()}
    assert load(short).groups == [] and "empty" in load(short).dropped[0].reason


BEHIND = {
    "\n\n Blue.": "Blue.",
    "\n    c = a\n    return c": "    c = a\n    return c",
    "  \n\treturn": "\treturn",
}
ENDS = {
    "It is <s>old</s>": None,
    "<s>a</s> b</s>": "<s>a</s> b",
    "Yes.<|im_end|>\n": "Yes.",
}


def test_a_repeated_prompt_goes_with_its_line_and_an_end_of_turn_but_no_struck_text() -> None:
    for behind, left in BEHIND.items():
        asked = [one(f"def f{i}(a):", f"def f{i}(a):{behind}", f"def f{i}(a): pass") for i in range(3)]
        for group in read(*asked)[0]:
            assert [c.text for c in group.completions] == [left, "pass"]
    for text, end in ENDS.items():
        ((group,), lines) = read(one("Why?", text))
        assert group.completions[0].text == (text if end is None else end)
        assert bool(lines) == (end is not None)
    groups = [one("Why?", "", "No."), one("Why?", "Yes.", " \n"), one("Why?", "Yes.", "No.")]
    wordless = "2 rows with an answer without a word, which teaches to end at once (first: f, row 1)"
    assert read(*groups) == (groups, (wordless,))
