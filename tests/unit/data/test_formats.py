"""Every dataset type that users bring, as strings and as messages, with calls of tools and with token ids,
and the rows that must be refused with a reason."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import ConfigError, DataError
from data.groups import check_token_ids, from_dict, read_groups, to_dict, write_groups
from data.json_values import LARGEST, are_finite
from data.markup import common_beginning
from data.quality import FITTING, kind_of
from data.sources import load_groups
from data.types import Completion, Group, Prompt, Turn
from tests.full_disk import full_disk
from tests.unit.data.people import ROWS, lines, load, local, said, words

PROMPTED = {"chosen": "x", "rejected": "y"}
HH = "\n\nHuman: a{}\n\nAssistant: "
TWO = {"prompt": "a", "response_a": "b", "response_b": "c"}
LED = {key: [{"role": "system", "content": "t"}, *said("a", key)] for key in PROMPTED}
PICTURE = [{"role": "user", "content": [{"type": "image"}]}]


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"prompt": "a", "chosen": "x", "rejected": "x"}, "the same"),
        ({"chosen": "yes", "rejected": "no"}, "prompt is empty"),
        ({"prompt": said("a", "b")} | PROMPTED, "end with a user turn"),
        ({"prompt": "a", "chosen": said("b", "x"), "rejected": said("b", "y")}, "not contain the prompt"),
        ({"chosen": said("a", "x"), "rejected": said("b", "y")}, "different conversations"),
        ({key: HH.format("?" * i) + key for i, key in enumerate(PROMPTED)}, "different conversations"),
        ({key: HH.format("\n\nHuman: b") + key for key in PROMPTED}, "different conversations"),
        ({"chosen": said("a", "x", "c"), "rejected": said("a", "x", "d")}, "end with an assistant turn"),
        ({"prompt": [{"role": "critic", "content": "a"}]} | PROMPTED, "role 'critic'"),
        ({"prompt": PICTURE} | PROMPTED, "no 'content' string"),
        ({"prompt": "a", "completions": ["x", "y"], "rewards": [1.0]}, "one length"),
        ({"prompt": "a", "completions": ["x"], "rewards": [float("nan")]}, "finite"),
        ({"prompt": "a", "completions": [{"finished": True}], "rewards": [0]}, "neither 'text' nor 'token_"),
        (TWO | {"winner": 1}, "'winner' is 1, which names neither"),
        ({"system": "s", "prompt": "a"} | LED, "own system turn"),
    ],
)
def test_a_bad_row_is_dropped_with_its_place_and_reason(record: dict, expected: str) -> None:
    (dropped,) = load(record).dropped
    assert (dropped.file, dropped.row) == ("f.jsonl", 1) and expected in dropped.reason


def test_ties_are_left_out_and_a_prompt_has_one_reference() -> None:
    dropped = load(*(TWO | {"winner": winner} for winner in ("tie", 1.5, math.nan, 0.2, "a"))).dropped
    assert [(d.row, d.reason == "a tie") for d in dropped if d.intended] == [(1, True), (2, True)]
    assert [d.row for d in dropped if not d.intended] == [3, 4]
    dropped = load(*({"prompt": Q, "reference": r} for r in "4475")).dropped
    assert [(d.row, "another reference answer" in d.reason) for d in dropped] == [(3, True), (4, True)]


TEXT = st.text(alphabet="ab ", max_size=10)


@given(TEXT, TEXT, TEXT)
def test_a_common_beginning_loses_nothing_and_splits_no_word(shared: str, one_end: str, other_end: str):
    left, right = shared + one_end, shared + other_end
    start = common_beginning(left, right)
    assert left.startswith(start) and right.startswith(start)
    rest = [side[len(start) :] for side in (left, right)]
    if all(rest) and start:
        assert rest[0][0].isspace() or rest[1][0].isspace()


def test_scores_of_a_prompt_are_one_group_and_a_type_that_is_none_is_dropped() -> None:
    rows = [(said(Q), GOOD, 0.25), ("other", "x", 0), (said(Q), BAD, -3)]
    scored = [{"type": "scalar_feedback", "prompt": p, "output": o, "reward": r} for p, o, r in rows]
    loaded = load(*scored, scored[0] | {"type": "loud_feedback"})
    assert [group.rewards for group in loaded.groups] == [(0.25, -3.0), (0.0,)]
    assert [(d.row, "loud_feedback" in d.reason) for d in loaded.dropped] == [(4, True)]


def test_what_is_unknown_is_refused_with_what_there_is() -> None:
    record = {"question": Q, "good": GOOD, "bad": BAD}
    for own, settings, message in (
        ({"left": "a", "right": "b"}, {}, r"data.columns=.*known format"),
        ({"prompt": "a"}, {"format": "preferences"}, r"data.format=preferences: use auto, preference"),
        ({"prompt": "a"}, {"format": "data.nowhere.function"}, "cannot be imported"),
    ):
        with pytest.raises(ConfigError, match=message):
            load(own, **settings)
    columns = {"prompt": "question", "chosen": "good", "rejected": "bad"}
    assert load(record, columns=columns, format="data.formats.preference").groups == [PAIR], "a function"


# Groups files


def test_a_groups_file_is_written_whole_and_read_whole(tmp_path) -> None:
    path = tmp_path / "rounds" / "groups.jsonl"
    sampled = (Completion("x", (1, 2), True), Completion(None, (3,), False))
    write_groups(path, [Group(ALONE.prompt, sampled, (0.5, 0.25)), PAIR])
    with full_disk(100), pytest.raises(OSError, match="too large"):
        write_groups(path, [PAIR] * 100)
    assert read_groups(path)[1:] == [PAIR]  # the old file, not half of the new one
    assert [p.name for p in path.parent.iterdir()] == ["groups.jsonl"]
    path.write_text(path.read_text()[:-20])
    with pytest.raises(DataError, match="line 2"):
        read_groups(path)


ODD = [0, -1, True, 0.5, 1e-3, 1.1e-3, LARGEST, -3.5e38, 10**400, math.nan, math.inf, None, "1", [1]]


def test_lists_are_checked_at_once_as_their_numbers_are_one_by_one() -> None:
    for values in map(list, itertools.product(ODD, repeat=2)):
        for most in (LARGEST, 1e-3):
            single = (isinstance(v, int | float) and -LARGEST <= v <= most for v in values)
            assert are_finite(values, most) == all(single), values


# Forms that no library asks for, and data of a kind that the loss learns nothing from


Q, GOOD, BAD = "Name a colour.", "Blue.", "Seven."
SFT = Group(Prompt((Turn("user", Q),)), (Completion(GOOD),), (1.0,))
PAIR = Group(Prompt((Turn("user", Q),)), (Completion(GOOD), Completion(BAD)), (1.0, -1.0))
ALONE = Group(Prompt((Turn("user", Q),)))
MARKED = Group(PAIR.prompt, (Completion(BAD),), (-1.0,))


@pytest.mark.parametrize("of", ROWS["formats"], ids=lambda of: of["form"])
def test_every_format_is_known_by_its_columns(of: dict) -> None:
    rows, settings = [*of.get("also", []), of["row"]], {}
    if of["form"] == "language_modelling":
        settings["apply_chat_template"] = False
    before = json.dumps(rows)
    for form in ("auto", of["form"])[not of.get("alone", True) :]:
        loaded = load(*json.loads(before), format=form, **settings)
        assert not loaded.dropped and loaded.format == of["form"] and json.dumps(rows) == before
        prompt, answers, rewards = of["group"]
        assert words(loaded) == [(prompt, answers, tuple(map(float, rewards)))]
        (group,) = loaded.groups
        system = ["system"] * (prompt[0] == "S")
        turns = [*system, *(("user", "assistant")[i % 2] for i in range(len(prompt) - len(system)))]
        assert [turn.role for turn in group.prompt.turns] == turns


def test_a_text_is_trained_on_whole_but_for_its_first_word_and_never_through_a_template() -> None:
    for text in ("Once upon a time.", "  Once\nupon", "a b"):
        (group,) = load({"text": text}, apply_chat_template=False).groups
        assert group.prompt.turns[0].content + str(group.completions[0].text) == text
    with pytest.raises(ConfigError, match=r"language modelling.*data.apply_chat_template=false"):
        load({"text": "Once upon a time."})
    assert "fewer than two words" in load({"text": "Once"}, apply_chat_template=False).dropped[0].reason


def test_every_kind_of_rows_is_told_from_the_others() -> None:
    scored, equal = (Group(PAIR.prompt, PAIR.completions, (0.5, other)) for other in (0.25, 0.5))
    found = map(kind_of, ([ALONE], [SFT], [SFT, MARKED], [PAIR], [scored], [equal]))
    assert list(found) == list(FITTING)


# Groups files know whose token ids they hold


OURS = "0123456789abcdef"


def group(*ids: int, tokenizer: str | None = OURS, question: str = "q") -> Group:
    sampled = Completion("a", ids, True, tokenizer)
    return Group(Prompt((Turn("user", question),)), (sampled, Completion("b")), (1.0, -1.0))


def read(path: Path) -> list[Group]:
    return load_groups(local(path, max_unreadable=1), "train").groups


def test_a_file_says_whose_ids_it_holds_and_the_first_that_are_not_the_models_are_named(tmp_path):
    path = tmp_path / "groups.jsonl"
    write_groups(path, [group(0, 18), group(18, tokenizer=None)])
    first, second = (json.loads(line)["completions"] for line in path.read_text().splitlines())
    assert [c.get("tokenizer") for c in first] == [OURS, None]
    assert all(c.keys() == {"text", "token_ids", "finished"} for c in (first[1], *second))
    for reader in (read_groups, read):
        assert [g.completions[0].tokenizer for g in reader(path)] == [OURS, None]
        check_token_ids(reader(path), OURS, 19)
    write_groups(path, [group(1), group(4, 19, question="r")])
    for made in (read_groups(path), read(path)):
        with pytest.raises(DataError, match=r"groups\.jsonl, row 2: .*take token_ids out of the "):
            check_token_ids(made, OURS, 19)


WRONG = [
    *({"token_ids": of} for of in (5, "abc", {}, [True], [-1], [1.0], [None])),
    *({"text": 3}, {"finished": "no"}, {"tokenizer": 7}),
]


def test_what_is_no_completion_is_dropped_with_a_reason(tmp_path):
    path = tmp_path / "groups.jsonl"
    for change in WRONG:
        write_groups(path, [group(1), group(2, question="r")])
        first, second = map(json.loads, path.read_text().splitlines())
        second["completions"][0] |= change
        lines(path, [first, second])
        assert len(read(path)) == 1
        with pytest.raises(DataError, match=f"line 2: .*{next(iter(change))}"):
            read_groups(path)


def test_a_temperature_is_read_as_it_was_written():
    for at in (0.5, 1.0, 2.0):
        sampled = Completion("a", (1,), True, OURS, behavior_logprobs=(-1.0,), behavior_temperature=at)
        (again,) = from_dict(to_dict(Group(Prompt((Turn("user", "q"),)), (sampled,), (1.0,)))).completions
        assert vars(again) == vars(sampled)


# Conversations with calls of tools


CALL = {"id": "c1", "type": "function", "function": {"name": "times", "arguments": '{"a": 12, "b": 7}'}}
MESSAGES = [
    {"role": "user", "content": "12 by 7?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "name": "times", "content": "84"},
    {"role": "assistant", "content": "It is 84.", "tool_calls": None},
]


def called(arguments: object) -> list[dict]:
    """The conversation with other arguments of its call."""
    other = json.loads(json.dumps(MESSAGES))
    other[1]["tool_calls"][0]["function"]["arguments"] = arguments
    return other


def group_of(messages: object) -> Group:
    (group,) = load({"messages": messages}).groups
    return group


def test_a_call_is_the_same_as_a_text_and_as_an_object_and_files_keep_it() -> None:
    """What templates write of it: test_templates."""
    group = group_of(MESSAGES)
    assert group_of(called(json.loads(CALL["function"]["arguments"]))).prompt == group.prompt
    assert from_dict(json.loads(json.dumps(to_dict(group)))) == group
    without = Prompt((*group.prompt.turns[:1], Turn("assistant", ""), Turn("tool", "84")))
    assert without.id != group.prompt.id


ARGUMENTS = {
    "{": "call of times cannot be used: it is no JSON",
    "[1]": "call of times are no object",
    r'{"city": "\ud800"}': "half of a surrogate pair",
    '{"a": ' + "[" * 300 + "]" * 300 + "}": "nested more than 100 levels deep",
    '{"a": ' + "7" * 5_000 + "}": "more than 4300 digits",
}


def test_what_is_no_call_is_named_and_its_row_dropped_with_its_reason() -> None:
    nameless = called({})
    nameless[1]["tool_calls"] = [{"name": "times"}]
    wrong = {"ends with a call of a tool": MESSAGES[:2], "has no 'function' with a 'name'": nameless}
    wrong |= {says: called(arguments) for arguments, says in ARGUMENTS.items()}
    loaded = load(*({"messages": messages} for messages in (*wrong.values(), *[MESSAGES] * 7)))
    assert len(loaded.groups) == 7 and [drop.row for drop in loaded.dropped] == [*range(1, 8)]
    for drop, says in zip(loaded.dropped, wrong, strict=True):
        assert says in drop.reason
