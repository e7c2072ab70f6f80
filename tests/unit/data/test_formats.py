"""Every dataset type that users bring, as strings and as messages, and the rows that must be refused with a
reason."""

from __future__ import annotations

import copy
import itertools
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import ConfigError, DataError
from config.schema_data import DataConfig
from data.formats import LARGEST, are_finite, common_beginning, is_finite
from data.groups import from_dict, read_groups, to_dict, write_groups
from data.rows import Loaded, Row
from data.sources import convert
from data.types import Completion, Group, Prompt, Turn
from tests.full_disk import full_disk

CONFIG = DataConfig(name="test", source="-")


def load(*records: dict, form: str = "auto", **columns: str) -> Loaded:
    rows = [Row("f.jsonl", i, record) for i, record in enumerate(records, 1)]
    return convert(rows, DataConfig(name="test", source="-", format=form, columns=columns), "f.jsonl")


def one(record: dict, form: str = "auto", **columns: str) -> Group:
    loaded = load(record, form=form, **columns)
    assert not loaded.dropped, loaded.dropped
    return loaded.groups[0]


def reason(record: dict, form: str = "auto") -> str:
    loaded = load(record, form=form)
    assert not loaded.groups
    assert (loaded.dropped[0].file, loaded.dropped[0].row) == ("f.jsonl", 1)
    return loaded.dropped[0].reason


def user(*contents: str) -> list[dict]:
    return [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]


def said(text: str) -> list[dict]:
    return [{"role": "assistant", "content": text}]


ASKED = Prompt((Turn("user", "What colour is the sky?"),))
PAIR = Group(ASKED, (Completion("Blue."), Completion("Green.")), (1.0, -1.0))


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "What colour is the sky?", "chosen": "Blue.", "rejected": "Green."},
        {"prompt": user("What colour is the sky?"), "chosen": said("Blue."), "rejected": said("Green.")},
        {"prompt": user("What colour is the sky?"), "chosen": "Blue.", "rejected": "Green."},
        {
            "chosen": user("What colour is the sky?", "Blue."),
            "rejected": user("What colour is the sky?", "Green."),
        },
        # princeton-nlp/llama3-ultrafeedback-armorm: the prompt as a string and again inside the conversations
        {
            "prompt_id": "x",
            "prompt": "What colour is the sky?",
            "chosen": user("What colour is the sky?", "Blue."),
            "rejected": user("What colour is the sky?", "Green."),
            "all_generated_responses": ["a", "b"],
            "all_rm_scores": [0.2, 0.1],
        },
    ],
    ids=["strings", "messages", "mixed", "implicit messages", "armorm"],
)
def test_every_shape_of_a_preference_is_the_same_pair(record: dict) -> None:
    before = copy.deepcopy(record)
    assert one(record) == PAIR
    assert record == before  # never changed in place


def test_an_implicit_string_prompt_is_the_common_beginning_up_to_a_word() -> None:
    group = one({"chosen": "The sky is blue.", "rejected": "The sky is black."})
    assert group.prompt.turns[-1].content == "The sky is"
    assert [c.text for c in group.completions] == [" blue.", " black."]


@given(
    st.text(alphabet="ab ", max_size=12),
    st.text(alphabet="ab ", max_size=8),
    st.text(alphabet="ab ", max_size=8),
)
def test_a_common_beginning_loses_nothing_and_splits_no_word(
    shared: str, one_end: str, other_end: str
) -> None:
    left, right = shared + one_end, shared + other_end
    start = common_beginning(left, right)
    assert left.startswith(start)
    assert right.startswith(start)
    rest = [side[len(start) :] for side in (left, right)]
    if all(rest) and start:
        assert rest[0][0].isspace() or rest[1][0].isspace()


def test_a_multi_turn_pair_keeps_the_whole_conversation_and_the_system_turn() -> None:
    system = [{"role": "system", "content": "Be brief."}]
    group = one(
        {"chosen": system + user("a", "b", "c", "yes"), "rejected": system + user("a", "b", "c", "no")}
    )
    assert [turn.role for turn in group.prompt.turns] == ["system", "user", "assistant", "user"]
    explicit = one({"prompt": system + user("a", "b", "c"), "chosen": said("yes"), "rejected": said("no")})
    assert explicit == group


def test_completions_prompts_and_labels() -> None:
    shown = Group(ASKED, (Completion("Blue."),), (1.0,))
    assert one({"prompt": "What colour is the sky?", "completion": "Blue."}) == shown
    assert one({"prompt": user("What colour is the sky?"), "completion": said("Blue.")}) == shown
    assert one({"messages": user("What colour is the sky?", "Blue.")}) == shown
    assert one({"prompt": "What colour is the sky?", "completion": "Blue.", "label": True}) == shown
    assert one(
        {"prompt": user("What colour is the sky?"), "completion": said("Blue."), "label": False}
    ).rewards == (-1.0,)
    assert one({"prompt": "What colour is the sky?"}) == Group(ASKED)
    assert one({"prompt": user("What colour is the sky?"), "reference": 7}).prompt.reference_answer == "7"


def test_halos_feedback() -> None:
    prompt = user("What colour is the sky?")
    loaded = load(
        {
            "type": "binary_feedback",
            "prompt": prompt,
            "output": said("Blue."),
            "label": 1,
            "reward": 0.3,
            "prompt_id": 4,
        },
        {"type": "binary_feedback", "prompt": prompt, "output": "Green.", "label": 0, "reward": 0.1},
        {
            "type": "pairwise_feedback",
            "prompt": prompt,
            "output_A": said("Blue."),
            "output_B": said("Green."),
            "label": 1,
        },
        {
            "type": "pairwise_feedback",
            "prompt": prompt,
            "output_A": said("Green."),
            "output_B": said("Blue."),
            "label": 0,
        },
        {"type": "scalar_feedback", "prompt": prompt, "output": said("Blue."), "reward": 0.25},
        {"type": "scalar_feedback", "prompt": user("other"), "output": said("x"), "reward": 0},
        {"type": "scalar_feedback", "prompt": prompt, "output": said("Green."), "reward": -3},
        {"type": "loud_feedback", "prompt": prompt},
    )
    assert [(g.rewards, [c.text for c in g.completions]) for g in loaded.groups] == [
        ((1.0,), ["Blue."]),
        ((-1.0,), ["Green."]),
        ((1.0, -1.0), ["Blue.", "Green."]),
        ((1.0, -1.0), ["Blue.", "Green."]),
        ((0.25, -3.0), ["Blue.", "Green."]),
        ((0.0,), ["x"]),
    ]
    assert [(d.row, "loud_feedback" in d.reason) for d in loaded.dropped] == [(8, True)]
    assert loaded.read == 8


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"prompt": "a", "chosen": "x", "rejected": "x"}, "the same"),
        ({"prompt": "a", "chosen": 3, "rejected": "x"}, "'chosen' is neither"),
        ({"prompt": " ", "chosen": "x", "rejected": "y"}, "prompt is empty"),
        ({"chosen": "yes", "rejected": "no"}, "prompt is empty"),
        ({"prompt": user("a", "b"), "chosen": "x", "rejected": "y"}, "end with a user turn"),
        (
            {"prompt": "a", "chosen": user("b", "x"), "rejected": user("b", "y")},
            "does not contain the prompt",
        ),
        ({"chosen": user("a", "x"), "rejected": user("b", "y")}, "different conversations"),
        ({"chosen": user("a", "x", "c"), "rejected": user("a", "x", "d")}, "end with an assistant turn"),
        ({"prompt": [{"role": "critic", "content": "a"}], "chosen": "x", "rejected": "y"}, "role 'critic'"),
        (
            {"prompt": [{"role": "tool", "content": "a"}], "chosen": "x", "rejected": "y"},
            "does not end with a user turn",
        ),
        (
            {"prompt": [{"role": "user", "content": [{"type": "image"}]}], "chosen": "x", "rejected": "y"},
            "no 'content' string",
        ),
        ({"prompt": "a", "completion": "b", "label": "good"}, "not true or false"),
        ({"prompt": "a", "completions": ["x", "y"], "rewards": [1.0]}, "one length"),
        ({"prompt": "a", "completions": ["x"], "rewards": [float("nan")]}, "finite"),
        (
            {"prompt": "a", "completions": [{"finished": True}], "rewards": [0]},
            "neither 'text' nor 'token_ids'",
        ),
    ],
)
def test_a_bad_row_is_dropped_with_its_place_and_reason(record: dict, expected: str) -> None:
    assert expected in reason(record)


def test_columns_are_mapped_and_a_wrong_name_is_refused() -> None:
    record = {"question": "What colour is the sky?", "good": "Blue.", "bad": "Green."}
    assert one(record, prompt="question", chosen="good", rejected="bad") == PAIR
    with pytest.raises(
        ConfigError,
        match=r"data.columns.prompt=qestion: f.jsonl has no such column; it has question, good, bad",
    ):
        one(record, prompt="qestion")
    scored = one(
        {"prompt": "q", "all_generated_responses": ["a", "b"], "all_rm_scores": [0.1, 0.7]},
        completions="all_generated_responses",
        rewards="all_rm_scores",
    )
    assert scored.rewards == (0.1, 0.7)


def test_unknown_columns_and_formats_are_refused_with_what_there_is() -> None:
    with pytest.raises(ConfigError, match=r"data.columns=.*known format"):
        load({"left": "a", "right": "b"})
    with pytest.raises(ConfigError, match=r"data.format=preferences: use auto, preference"):
        load({"prompt": "a"}, form="preferences")
    with pytest.raises(ConfigError, match="cannot be imported"):
        load({"prompt": "a"}, form="data.nowhere.function")


def test_a_format_may_be_anybodys_function() -> None:
    record = {"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "\n\nHuman: a\n\nAssistant: c"}
    assert load(record, form="data.published.hh").groups


# Groups files

turns = st.lists(st.text(max_size=8), min_size=0, max_size=2)
completions = st.builds(
    Completion, st.text(max_size=8), st.none() | st.lists(st.integers(0, 9)).map(tuple), st.booleans()
)


@given(
    st.text(min_size=1, max_size=8).filter(str.strip),
    st.none() | st.text(max_size=4),
    st.lists(completions, max_size=3),
    st.data(),
)
def test_a_group_survives_its_json(
    asked: str, reference: str | None, answers: list[Completion], data: st.DataObject
) -> None:
    rewards = tuple(data.draw(st.floats(allow_nan=False, allow_infinity=False, width=32)) for _ in answers)
    group = Group(Prompt((Turn("user", asked),), reference), tuple(answers), rewards)
    assert from_dict(json.loads(json.dumps(to_dict(group)))) == group


def test_a_groups_file_is_written_whole_and_read_whole(tmp_path) -> None:
    path = tmp_path / "rounds" / "groups.jsonl"
    group = Group(ASKED, (Completion("Blue.", (1, 2), True), Completion(None, (3,), False)), (0.5, 0.25))
    write_groups(path, [group, PAIR])
    assert read_groups(path) == [group, PAIR]
    assert [p.name for p in path.parent.iterdir()] == ["groups.jsonl"]
    assert json.loads(path.read_text().splitlines()[0])["id"] == ASKED.id

    def fails():
        yield group
        raise RuntimeError("killed")

    with pytest.raises(RuntimeError):
        write_groups(path, fails())
    with full_disk(100), pytest.raises(OSError, match="too large"):
        write_groups(path, [group] * 100)
    assert read_groups(path) == [group, PAIR]  # the old file, not half of the new one
    assert [p.name for p in path.parent.iterdir()] == ["groups.jsonl"]
    path.write_text(path.read_text()[:-20])
    with pytest.raises(DataError, match="line 2"):
        read_groups(path)


def test_a_conversation_with_a_tool_asks_for_the_answer_behind_it():
    """The call and its result are the prompt; a prompt may end with a result that is still to be answered."""
    asked = [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "add(2, 2)"},
        {"role": "tool", "content": "4"},
    ]
    (group,) = load({"messages": [*asked, {"role": "assistant", "content": "four"}]}).groups
    assert [turn.role for turn in group.prompt.turns] == ["user", "assistant", "tool"]
    assert [c.text for c in group.completions] == ["four"]
    (pair,) = load({"prompt": asked, "chosen": "four", "rejected": "five"}).groups
    assert pair.prompt == group.prompt
    assert load(
        {"prompt": [*asked, {"role": "assistant", "content": "four"}], "chosen": "x", "rejected": "y"}
    ).dropped


ODD = [
    0,
    -1,
    True,
    0.5,
    1e-3,
    1.1e-3,
    LARGEST,
    -3.5e38,
    10**400,
    -(10**400),
    math.nan,
    math.inf,
    None,
    "1",
    [1],
]


@pytest.mark.parametrize("length", range(4))
def test_lists_are_checked_at_once_as_their_numbers_are_one_by_one(length: int) -> None:
    for values in map(list, itertools.product(ODD, repeat=length)):
        assert are_finite(values) == all(map(is_finite, values)), values
        assert are_finite(values, most=1e-3) == all(is_finite(v) and v <= 1e-3 for v in values), values
