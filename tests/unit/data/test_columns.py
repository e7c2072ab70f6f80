"""Columns that decide what is trained on: read in the forms that people bring and that public sets have, or
refused with the line to type, which works."""

from __future__ import annotations

import csv
import json
import math
import random
import re
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from common.errors import ConfigError, UserError
from data.columns import READ, WORDS
from data.rows import Loaded
from data.sources import load_groups, load_splits
from data.views import prompts_of
from tests.tiny import make_config
from tests.unit.data.people import lines, load, local, said, words
from train import train

Q, A, B = "Name a colour.", "Blue.", "Seven."


PREFERRED = {"prompt": Q, "chosen": A, "rejected": B}


@pytest.mark.parametrize(
    ("record", "remedies"),
    [
        ({"question": Q, "good answer": A, "bad answer": B}, ["{chosen: good answer, rejected: bad answer}"]),
        ({"prompt": Q, "generated_text": A, "is_good": 1}, ["label: is_good", "completion: generated_text"]),
        ({"prompt": Q, "answer": "4"}, ["{reference: answer}"]),
        ({"prompt": Q, "response_a": A, "response_b": B}, ['"data.ignore_columns=[response_a, response_b]"']),
        ({"prompt": Q, "completion": A, "images": ["a.png"]}, ["no text model", "ignore_columns=[images]"]),
        ({"prompt": Q, "completion": A, "label": False, "is_desirable": True}, ["reads 'is_desirable'"]),
        ({"prompt": Q, "completions": [A, B], "rewards": [1, 0], "weight": 0.0}, ["reads 'weight'"]),
        ({"prompt": Q, "completion": A, "reward": 1.0, "score": 4}, ["reads 'score'"]),
        ({"prompt": Q, "completions": [A, B], "labels": [True, False]}, ["stepwise supervision"]),
        (PREFERRED | {"margin": 0.5}, ['"data.numbers=[margin]" for a loss', "data.ignore_columns=[margin]"]),
        (PREFERRED | {"ref_chosen_logps": 0.5}, ["made elsewhere; here a run makes them"]),
        ({"prompt": Q, "completion": A, "chat_template_kwargs": {"enable_thinking": False}},
         ["model.chat_template_kwargs={enable_thinking: false}", "[chat_template_kwargs]"]),
        ({"ctx": Q, "endings": [A, B, "Two."], "label": "1"}, ["the question and the choices endings)"]),
        ({"article": "a b " * 9, "question": Q, "options": [A, B], "answer": "B"}, ["choices options) and"]),
    ],
)  # fmt: skip
def test_a_column_that_decides_is_refused_with_what_to_do(record: dict, remedies: list[str]) -> None:
    try:
        error = load(*[record] * 3).refusal  # of prompts without answers, which a reward function may read
    except ConfigError as raised:
        error = raised
    assert all(remedy in str(error) for remedy in ["f.jsonl", *remedies]), error


KNOWN = {name for names in WORDS.values() for name in names.partition("|")[0].split()}
KNOWN |= {"ground_truth", "final_answer", "is_desirable"}.union(*READ.values()) - {"final", "ground", "truth"}


@given(st.dictionaries(st.sampled_from(sorted(KNOWN)), st.just("x y")))
@example(dict.fromkeys(("better_response_id", "conversation"), "x y"))
def test_no_known_column_of_a_text_is_unread_in_silence(record: dict) -> None:
    """Whatever known columns a row has: all are read, or the refusal names one, and its line is YAML."""
    try:
        loaded = load({name: f"{name} z" for name in record})
        if loaded.refusal is not None:
            raise loaded.refusal
        assert not loaded.unused or not loaded.groups
    except UserError as error:
        for line in re.findall(r'"data\.(?:ignore_)?columns=(.*?)"', str(error)):
            yaml.safe_load(line)


@pytest.mark.parametrize("key", ["weight", "train", "training", "trainable", "loss"])
@pytest.mark.parametrize(
    ("marked", "which", "trained"),
    [
        ((None, None, None), None, "c"),
        ((None, None, None), "all", "abc"),
        ((None, None, None), "marked", ""),
        ((True, None, False), None, "a"),
        ((1, "0", "1"), "marked", "ac"),
        ((0, None, None), None, "bc"),
        ((True, True, False), "all", "abc"),
        ((True, True, True), "last", "c"),
        ((True, True, False), "last", ""),
        ((False, False, False), None, ""),
    ],
)
def test_the_answers_that_are_trained_are_those_that_a_row_marks(
    key: str, marked: tuple, which: str | None, trained: str
) -> None:
    messages = said(Q, "a", "two", "b", "three", "c")
    for message, mark in zip(messages[1::2], marked, strict=True):
        message |= {} if mark is None else {key: mark}
    loaded = load({"messages": messages}, trained_turns=which)
    assert [group.completions[0].text for group in loaded.groups] == list(trained)
    assert [len(group.prompt.turns) for group in loaded.groups] == [1 + 2 * "abc".index(x) for x in trained]
    assert trained or [d.intended for d in loaded.dropped] == [True]
    untrained = 0 if not trained else "abc".index(trained[-1]) + 1 - len(trained)
    assert [line.split(" ")[0] for line in loaded.read_back] == [str(untrained)][: bool(untrained)]


def test_marks_that_a_row_of_one_answer_cannot_train_are_refused() -> None:
    first, second = (
        [*said(Q), {**said("", A)[1], "weight": one}, *said("two"), {**said("", B)[1], "weight": two}]
        for one, two in ((1, 1), (0, 0))
    )
    pair = {"chosen": first, "rejected": [*first[:-1], {**first[-1], "content": "other"}]}
    for row in (pair, {"messages": first, "label": True}):
        (why,) = load(row).dropped
        assert "before the last are marked" in why.reason and "trained_turns=last" in why.reason
        assert len(load(row, trained_turns="last").groups) == 1
    (why,) = load({"messages": second, "label": True}).dropped
    assert why.intended and "not to be learned" in why.reason
    (why,) = load({"messages": [*said(Q), {**said("", A)[1], "weight": 0.5}]}).dropped
    assert "not true or false" in why.reason


def test_the_answers_of_one_conversation_are_held_out_together(tmp_path) -> None:
    rows = [{"messages": said(f"q {i}", "a", f"{i}", "b")} for i in range(40)]
    config = local(lines(tmp_path / "a.jsonl", rows), trained_turns="all", eval_fraction=0.3)
    train, held_out = ({g.prompt.turns[0].content for g in side.groups} for side in load_splits(config))
    assert train and held_out and not train & held_out


@pytest.mark.parametrize("first", [None, math.nan, ""])
def test_a_column_that_decides_is_seen_where_the_first_rows_leave_it_empty(first: object) -> None:
    rows = [{"prompt": f"{Q} {i}", "chosen": A, "rejected": B, "margin": first} for i in range(100)]
    late = [{**row, "prompt": f"{Q} late {i}", "margin": 0.5} for i, row in enumerate(rows)]
    mixed = [row for both in zip(rows, late, strict=True) for row in both]
    for order in ([*rows, *late], [*late, *rows], mixed):
        with pytest.raises(ConfigError, match="nothing reads 'margin'"):
            load(*order)
    assert len(load(*rows).groups) == 100 and len(load(*rows, *late[:2]).groups) == 102


def test_numbers_that_pandas_writes_are_references() -> None:
    given_answers = [math.nan, 4.0, 0.5, "", 7]
    loaded = load(*({"prompt": f"{Q} {i}", "reference": value} for i, value in enumerate(given_answers)))
    assert [g.prompt.reference_answer for g in loaded.groups] == [None, "4", "0.5", "", "7"]


def test_a_pair_whose_prompt_is_empty_has_none_and_is_not_given_one() -> None:
    rows = [{"prompt": f"{Q} {i}", "chosen": f"good {i}", "rejected": f"bad {i}"} for i in range(9)]
    empty = {"prompt": None, "chosen": "The sky is blue today", "rejected": "The sky is red today"}
    loaded = load(*rows, empty)
    assert len(loaded.groups) == 9 and [d.reason for d in loaded.dropped] == ["no 'prompt'"]


def test_the_same_prompt_with_other_columns_is_counted_and_the_first_kept() -> None:
    rows = [{"prompt": f"{Q} {i // 2}", "answer_key": i} for i in range(6)]
    loaded = load(*rows)
    assert [json.loads(g.prompt.columns) for g in loaded.groups] == [{"answer_key": i} for i in (0, 2, 4)]
    assert len(loaded.dropped) == 3
    assert all(d.intended and "same prompt came before" in d.reason for d in loaded.dropped)
    assert len(load(*rows[::2], *rows[::2]).groups) == 6, "equal ones"
    known = load(*({"prompt": Q, "reference": answer} for answer in (None, "x", None)))
    assert [prompt.reference_answer for prompt in prompts_of(known.groups)] == ["x"]


def test_an_ignored_column_is_not_read_and_must_be_there() -> None:
    loaded = load({"prompt": Q, "completion": A, "label": False}, ignore_columns=["label"])
    assert words(loaded) == [([Q], [A], (1.0,))]
    with pytest.raises(ConfigError, match=r"data.ignore_columns=labels: f.jsonl has no such column"):
        load({"prompt": Q, "completion": A}, ignore_columns=["labels"])
    with pytest.raises(ConfigError, match=r'columns.promt=q: did you mean "data.columns={prompt: q}"\?'):
        load({"q": Q, "completion": A}, columns={"promt": "q"})


def test_columns_may_be_paths_into_columns() -> None:
    row = {"prompt": Q, "reward_model": {"ground_truth": 4}, "extra": '{"answers": ["a", "b"]}'}
    for path, answer, ignored in (("reward_model.ground_truth", "4", []),
                                  ("extra.answers.1", "b", ["reward_model"])):  # fmt: skip
        (group,) = load(row, columns={"reference": path}, ignore_columns=ignored).groups
        assert group.prompt.reference_answer == answer
    with pytest.raises(ConfigError, match=r"reward_model.truth: .*reward_model has ground_truth"):
        load(row, columns={"reference": "reward_model.truth"})


def test_rows_that_cannot_be_read_are_refused_beyond_a_tenth(tmp_path) -> None:
    """The first rows show the format together, though the very first are of another."""
    good = {"prompt": Q, "chosen": A, "rejected": B}
    lines(tmp_path / "a.jsonl", [{"instruction": Q, "output": A}] * 6)
    lines(tmp_path / "b.jsonl", [good] * 9)
    said = r"^data\.max_unreadable=0\.1: 6 of the 15 rows of .* no column 'chosen'.*data\.max_unreadable=0\.4"
    with pytest.raises(ConfigError, match=said):
        load_groups(local(tmp_path), "train")
    assert len(load_groups(local(tmp_path, max_unreadable=0.4), "train").groups) == 9
    same = lines(tmp_path / "c.jsonl", [good, good | {"rejected": A}])  # left out on purpose
    assert len(load_groups(local(same), "train").groups) == 1


@pytest.mark.parametrize("separator", [",", ";", "\t", "|"])
def test_the_separator_and_a_byte_order_mark_of_a_table_are_recognised(tmp_path, separator: str) -> None:
    path, asked = tmp_path / "a.csv", f"{Q}, {Q}; {Q}\n\t"
    with path.open("w", encoding="utf-8-sig", newline="") as stream:
        out = csv.writer(stream, delimiter=separator)
        out.writerows([["prompt", "chosen; or, not", "rejected"], *[[asked, A, B]] * 30])
    loaded = load_groups(local(path, columns={"chosen": "chosen; or, not"}), "train")
    assert [[t.content for t in g.prompt.turns] for g in loaded.groups] == [[asked]] * 30


def test_a_table_adds_no_nulls_and_keeps_the_order_of_arguments(tmp_path) -> None:
    records = [{"messages": said(Q, "", "4", A)} for _ in range(2)]
    for record, arguments in zip(records, ({"zone": "a", "city": "b"}, {"zone": "c"}), strict=True):
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        record["messages"][1] |= {"tool_calls": [call]}
        record["messages"][2] |= {"role": "tool"}
    datasets.Dataset.from_list(records).to_parquet(tmp_path / "a.parquet")
    found = load_groups(local(tmp_path / "a.parquet"), "train").groups
    assert found == load_groups(local(lines(tmp_path / "a.jsonl", records)), "train").groups
    assert '{"zone": "a", "city": "b"}' in found[0].prompt.turns[1].keys
    assert '{"zone": "c"}' in found[1].prompt.turns[1].keys


def test_labelled_losses_refuse_one_label_alone_and_pairs_that_are_cut_to_one_are_counted(tmp_path, capsys):
    own = ("data=local", "data.eval_fraction=0", "model.batch_size=1", "dry_run=true")
    path = lines(tmp_path / "a.jsonl", ({"prompt": f"1{i}+10=", "completion": "20"} for i in range(8)))
    with pytest.raises(ConfigError, match=r"desirable answers alone .*loss=sft.*data.one_label=true"):
        train(make_config("loss=kto", f"data.path={path}", *own), "run")
    rows = [{"prompt": f"1{i}+10=", "chosen": f"{'1' * 40}{i}", "rejected": "1" * 40} for i in range(3)]
    path = lines(tmp_path / "b.jsonl", [*rows, {"prompt": "11+11=", "chosen": "22", "rejected": "21"}])
    lengths = ("model.max_length=30", "model.max_prompt_length=20")
    train(make_config("loss=dpo", f"data.path={path}", *own, *lengths), "run")
    counted = "without an example: 3 of 4 groups (3 × its two answers are the same once cut"
    assert counted in capsys.readouterr().out


# Columns of public sets: what should have been read stops the run, and nothing else does


PUBLIC = yaml.safe_load((Path(__file__).parent / "public.yaml").read_text(encoding="utf-8"))
INVENTED = [f"{a}{b}{c}" for a in "bdfgklmnprst" for b in "aeiou" for c in ("n", "r", "st", "m")]
SPEAKERS = {"said": said, "shared": partial(said, role="from", content="value", names=("human", "gpt"))}


def rows_of(name: str) -> list[dict]:
    """Rows of a public set, of texts of invented words."""
    draw, form = random.Random(0), json.dumps(PUBLIC[name]["row"])

    def row(i: int) -> dict:
        texts: dict[object, str] = {}
        made = SPEAKERS | {"each": lambda *of: of[i % len(of)]}

        def text(found: re.Match[str]) -> str:
            new = " ".join(draw.choices(INVENTED, k=int(found[2])))
            return texts.setdefault(found[1] or found.start(), new)

        def value(found: dict) -> Any:
            key, *more = found
            return made[key](*found[key]) if key in made and not more else found

        numbered = re.sub(r"\{i(-\d)?\}", lambda found: str(i + int(found[1] or 0)), form)
        return json.loads(re.sub(r"<(?:(\w):)?(\d+)>", text, numbered), object_hook=value)

    return [row(i) for i in range(30)]


def outcome(path: Path, records: list[dict], **settings: object) -> Loaded | UserError:
    try:
        loaded = load_groups(local(lines(path, records), max_unreadable=1, **settings), "train")
    except UserError as error:
        return error
    return loaded.refusal or loaded


def typed_lines(error: UserError) -> list[dict]:
    """The settings of each line that a refusal says to type; two that belong together are one."""
    lines = re.findall(r'"data\.[^"]*"(?: "data\.[^"]*")*', str(error))
    return [
        {key: yaml.safe_load(value) for key, value in re.findall(r'"data\.(\w+)=(.*?)"', line)}
        for line in lines
    ]


@pytest.mark.parametrize("name", PUBLIC)
def test_public_rows_are_read_or_refused_and_every_line_to_type_works(tmp_path, name: str) -> None:
    path, column = tmp_path / "a.jsonl", PUBLIC[name].get("refused")
    found = outcome(path, rows_of(name))
    assert isinstance(found, Loaded) == (column is None), found
    assert column in str(found) if column else not found.dropped
    for settings in typed_lines(found) if isinstance(found, UserError) else ():
        if "…" not in str(settings):
            assert isinstance(outcome(path, rows_of(name), **settings), Loaded), settings


@pytest.mark.parametrize(
    ("key", "value", "read"),
    [
        *((key, "Red?", {key: "Red?"}) for key in ("reasoning_content", "reasoning", "thinking")),
        *((key, "Red?", {"reasoning_content": "Red?"}) for key in ("thought", "thinking_content")),
        ("reasoning_details", [{"type": "reasoning.text", "text": "Red?"}], {"reasoning_content": "Red?"}),
        ("mood", "glad", "nothing of the key 'mood' of messages"),
        ("thought", 5, "in a message of 'messages' 'reasoning_content' is a int, not a string"),
        ("reasoning_details", [{"data": "x"}], "'reasoning_content' is a NoneType, not a string"),
    ],
)
def test_a_thought_reaches_the_template_whatever_its_name(key: str, value: object, read: dict | str) -> None:
    messages = said(Q, A)
    loaded = load({"messages": [messages[0], messages[1] | {key: value}]})
    if isinstance(read, str):
        assert read in str([*loaded.read_back, *loaded.dropped])
    else:
        assert json.loads(loaded.groups[0].completions[0].keys) == read and not loaded.read_back


def test_a_column_of_thoughts_is_mapped(tmp_path) -> None:
    row = {"prompt": Q, "thinking": "Red?", "completion": A}
    (settings, *_) = typed_lines(outcome(tmp_path / "a.jsonl", [row]))
    assert settings == {"columns": {"reasoning_content": "thinking"}}
    (group,) = load(row, **settings).groups
    assert json.loads(group.completions[0].keys) == {"reasoning_content": "Red?"}
