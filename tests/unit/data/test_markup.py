"""Rendered texts are read back into the turns that they came from, in every known markup, and nothing else is
touched."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from config.schema_data import DataConfig
from data.markup import Reader, repeats_prompt, unrendered
from data.rows import Dropped, Row, RowError
from data.sources import load_groups
from data.types import Completion, Group, Prompt, Turn

# As published templates write them: (before all, a turn of each role, the heading of the answer, its end)
WRITTEN = {
    "ChatML": ("", "<|im_start|>{role}\n{text}<|im_end|>\n", "<|im_start|>assistant\n", "<|im_end|>"),
    "Llama 3": (
        "<|begin_of_text|>",
        "<|start_header_id|>{role}<|end_header_id|>\n\n{text}<|eot_id|>",
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "<|eot_id|>",
    ),
    "Gemma": (
        "<bos>",
        "<start_of_turn>{role}\n{text}<end_of_turn>\n",
        "<start_of_turn>model\n",
        "<end_of_turn>",
    ),
    "Zephyr and Phi-3": ("", "<|{role}|>\n{text}</s>\n", "<|assistant|>\n", "</s>"),
    "Granite": (
        "",
        "<|start_of_role|>{role}<|end_of_role|>{text}<|end_of_text|>\n",
        "<|start_of_role|>assistant<|end_of_role|>",
        "<|end_of_text|>",
    ),
    "harmony": ("", "<|start|>{role}<|message|>{text}<|end|>", "<|start|>assistant<|message|>", "<|return|>"),
    "Human and Assistant": ("", "\n\n{role}: {text}", "\n\nAssistant:", ""),
}
NAMES = {
    "Gemma": {"assistant": "model"},
    "Human and Assistant": {"user": "Human", "assistant": "Assistant"},
}
CONFIG = DataConfig(name="t", source="-")
LOCAL = DataConfig(name="t", source="data.sources.local", eval_fraction=0.0)
WORDS = st.text(st.characters(categories=("L", "N"), include_characters=" .,?!"), min_size=1).filter(
    lambda text: text == text.strip()
)


def one(prompt: str, *answers: str) -> Group:
    return Group(
        Prompt((Turn("user", prompt),)),
        tuple(map(Completion, answers)),
        tuple(map(float, range(len(answers)))),
    )


def written(name: str, turns: list[Turn]) -> str:
    begin, turn, _, _ = WRITTEN[name]
    names = NAMES.get(name, {})
    return begin + "".join(turn.format(role=names.get(t.role, t.role), text=t.content) for t in turns)


@pytest.mark.parametrize("name", WRITTEN)
@given(
    texts=st.lists(WORDS, min_size=1, max_size=4),
    system=WORDS,
    answers=st.lists(WORDS, min_size=2, max_size=2),
)
def test_a_rendered_prompt_is_its_turns_again(name, texts, system, answers):
    spoken = texts[: (len(texts) - 1) // 2 * 2 + 1]
    turns = [Turn(("user", "assistant")[i % 2], text) for i, text in enumerate(spoken)]
    if name not in ("Human and Assistant", "Gemma"):
        turns = [Turn("system", system), *turns]
    _, _, heading, end = WRITTEN[name]
    found, read = unrendered(one(written(name, turns) + heading, *(answer + end for answer in answers)))
    assert found == name and list(read.prompt.turns) == turns
    assert [completion.text for completion in read.completions] == answers
    whole = [written(name, turns) + heading + (" " if not end else "") + answer + end for answer in answers]
    if turns[0].role != "system" and len(turns) == 1:
        found, read = unrendered(one(turns[0].content, *whole))
        assert found == name and list(read.prompt.turns) == turns
        assert [completion.text for completion in read.completions] == answers


@pytest.mark.parametrize(
    ("prompt", "answer", "turns", "said"),
    [
        ("<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nWhy? [/INST]", " So.</s>", ["Be brief.", "Why?"], "So."),
        ("[INST] A? [/INST] B.</s>[INST] C? [/INST]", "D.", ["A?", "B.", "C?"], "D."),
        (
            "Below is an instruction that describes a task. Write a response that appropriately completes "
            "the request.\n\n### Instruction:\nAdd 2 and 3.\n\n### Response:\n",
            "5",
            ["Add 2 and 3."],
            "5",
        ),
        ("A chat between two. USER: Hi! ASSISTANT:", " Hello.</s>", ["A chat between two.", "Hi!"], "Hello."),
        (
            "<｜begin▁of▁sentence｜>Be kind.<｜User｜>Hi<｜Assistant｜>",
            "Ho<｜end▁of▁sentence｜>",
            ["Be kind.", "Hi"],
            "Ho",
        ),
        (
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n",
            "x</think>\n\nHo",
            ["Hi"],
            "<think>\nx</think>\n\nHo",
        ),
    ],
)
def test_what_other_templates_write(prompt, answer, turns, said):
    _, read = unrendered(one(prompt, answer))
    assert [turn.content for turn in read.prompt.turns] == turns and read.completions[0].text == said


@pytest.mark.parametrize(
    "prompt",
    [
        "What does <|im_start|>user mean?",
        "# A title\n### Instruction: none\nText.",
        "USER: is this one? ASSISTANT: it is.",
        "Explain `[INST]` to me.",
        "He said:\n\nHuman: what?",
    ],
)
def test_a_text_about_markup_stays_as_it_is(prompt):
    group = one(prompt, "a", "b")
    assert unrendered(group) == ("", group) and unrendered(group)[1] is group


@pytest.mark.parametrize(
    ("prompt", "answer"),
    [
        ("<|im_start|>user\nA<|im_end|>\n<|im_start|>assistant\n", "B<|im_end|>\n<|im_start|>user\nC"),
        ("<|im_start|>system\nA<|im_end|>\n", "B"),
        ("Question", "<|im_start|>user\nAnother<|im_end|>\n<|im_start|>assistant\nB<|im_end|>"),
        ("<|im_start|>tool\nA<|im_end|>\n<|im_start|>assistant\n", "B"),
    ],
)
def test_what_can_mean_several_things_is_dropped_with_the_reason(prompt, answer):
    ((found, _),) = Reader(CONFIG).read(iter([(one(prompt, answer), Row("f.jsonl", 7, {}))]))
    assert isinstance(found, Dropped) and "ChatML" in found.reason
    assert (found.file, found.row) == ("f.jsonl", 7)
    with pytest.raises(RowError):
        unrendered(one(prompt, answer))


def test_a_prompt_at_the_head_of_every_answer_is_taken_off_and_counted():
    asked = [
        one(f"What is {i}?", f"What is {i}? It is a number.", f"What is {i}? I do not know.")
        for i in range(70)
    ]
    reader = Reader(CONFIG)
    read = [group for group, _ in reader.read((group, Row("f", i, {})) for i, group in enumerate(asked, 1))]
    assert {tuple(c.text for c in group.completions) for group in read} == {
        ("It is a number.", "I do not know.")
    }
    (line,) = reader.lines
    assert line == "70 rows whose answers began with the prompt, which was taken off (first: f, row 1)"
    some, reader = [*asked[:9], one("Why?", "Why? Because.", "No.")], Reader(CONFIG)
    assert [group for group, _ in reader.read((g, None) for g in some)] == some, "one answers otherwise"
    (line,) = reader.lines
    assert line.startswith("9 rows whose answers begin with the prompt, as not all do: left so")
    assert not repeats_prompt(one("1", "10"))


@pytest.mark.parametrize(
    ("behind", "left"),
    [
        (" Blue.", "Blue."),
        ("\nBlue.", "Blue."),
        ("\n\n Blue.", "Blue."),
        ("\n    c = a\n    return c", "    c = a\n    return c"),
        ("  \n\treturn", "\treturn"),
    ],
)
def test_the_first_line_behind_a_repeated_prompt_keeps_its_indentation(behind, left):
    asked = [one(f"def f{i}(a):", f"def f{i}(a):{behind}", f"def f{i}(a): pass") for i in range(3)]
    for group, _ in Reader(CONFIG).read((group, None) for group in asked):
        assert [c.text for c in group.completions] == [left, "pass"]


def test_answers_without_a_word_are_counted():
    groups = [one("Why?", "", "No."), one("Why?", "Yes.", " \n"), one("Why?", "Yes.", "No.")]
    reader = Reader(CONFIG)
    assert [g for g, _ in reader.read((g, Row("f", i, {})) for i, g in enumerate(groups, 1))] == groups
    assert reader.lines == (
        "2 rows with an answer without a word, which teaches to end at once (first: f, row 1)",
    )


@pytest.mark.parametrize(
    ("text", "left"),
    [("It is <s>old</s>", None), ("<s>x</s>", None), ("Yes.</s>", "Yes."), ("<s>a</s> b</s>", "<s>a</s> b")],
)
def test_a_struck_text_is_no_end_of_turn(text, left):
    name, group = unrendered(one("Why?", text))
    assert group.completions[0].text == (text if left is None else left) and bool(name) == (left is not None)


def test_nothing_changes_where_no_template_is_applied():
    group = one("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", "Ho<|im_end|>")
    assert list(Reader(replace(CONFIG, apply_chat_template=False)).read(iter([(group, None)]))) == [
        (group, None)
    ]


@pytest.mark.parametrize("name", [name for name in WRITTEN if WRITTEN[name][3]])
def test_a_prompt_that_two_whole_dialogues_share_is_read(name, tmp_path):
    begin = written(name, [Turn("user", "Capital of 1?")]) + WRITTEN[name][2]
    said, end = {"chosen": "City", "rejected": "Cities"}, WRITTEN[name][3]
    row = {key: begin + words + end for key, words in said.items()}
    (tmp_path / "f.jsonl").write_text(json.dumps(row))
    (group,) = load_groups(replace(LOCAL, path=str(tmp_path / "f.jsonl")), "train").groups
    assert group.prompt.turns == (Turn("user", "Capital of 1?"),)
    assert [completion.text for completion in group.completions] == ["City", "Cities"]
