"""Every dataset type that users bring, as strings and as messages, and the rows that must be refused with a
reason."""

from __future__ import annotations

import itertools
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import ConfigError, DataError
from data.groups import from_dict, read_groups, to_dict, write_groups
from data.json_values import LARGEST, are_finite
from data.kinds import FITTING, kind_of
from data.markup import common_beginning
from data.types import Completion, Group, Prompt, Turn
from tests.full_disk import full_disk
from tests.tiny import make_config
from tests.unit.data.people import lines, load, said
from train import train


def one(record: dict, **columns: str) -> Group:
    loaded = load(record, columns=columns)
    assert not loaded.dropped, loaded.dropped
    return loaded.groups[0]


def reason(record: dict) -> str:
    loaded = load(record)
    assert not loaded.groups
    assert (loaded.dropped[0].file, loaded.dropped[0].row) == ("f.jsonl", 1)
    return loaded.dropped[0].reason


def answer(text: str) -> list[dict]:
    return [{"role": "assistant", "content": text}]


ASKED = Prompt((Turn("user", "What colour is the sky?"),))
SKY = Group(ASKED, (Completion("Blue."), Completion("Green.")), (1.0, -1.0))


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
        {"chosen": system + said("a", "b", "c", "yes"), "rejected": system + said("a", "b", "c", "no")}
    )
    assert [turn.role for turn in group.prompt.turns] == ["system", "user", "assistant", "user"]
    explicit = one(
        {"prompt": system + said("a", "b", "c"), "chosen": answer("yes"), "rejected": answer("no")}
    )
    assert explicit == group


def test_halos_feedback() -> None:
    blue, green = answer("Blue."), answer("Green.")

    def row(kind: str, **values: object) -> dict:
        return {"type": f"{kind}_feedback", "prompt": said("What colour is the sky?"), **values}

    loaded = load(
        row("binary", output=blue, label=1, reward=0.3, prompt_id=4),
        row("binary", output="Green.", label=0, reward=0.1),
        row("pairwise", output_A=blue, output_B=green, label=1),
        row("pairwise", output_A=green, output_B=blue, label=0),
        row("scalar", output=blue, reward=0.25),
        row("scalar", output=answer("x"), reward=0) | {"prompt": said("other")},
        row("scalar", output=green, reward=-3),
        row("loud"),
    )
    assert [(g.rewards, [c.text for c in g.completions]) for g in loaded.groups] == [
        ((1.0,), ["Blue."]),
        ((-1.0,), ["Green."]),
        *[((1.0, -1.0), ["Blue.", "Green."])] * 2,
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
        ({"prompt": said("a", "b"), "chosen": "x", "rejected": "y"}, "end with a user turn"),
        (
            {"prompt": "a", "chosen": said("b", "x"), "rejected": said("b", "y")},
            "does not contain the prompt",
        ),
        ({"chosen": said("a", "x"), "rejected": said("b", "y")}, "different conversations"),
        ({"chosen": said("a", "x", "c"), "rejected": said("a", "x", "d")}, "end with an assistant turn"),
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
    assert one(record, prompt="question", chosen="good", rejected="bad") == SKY
    with pytest.raises(ConfigError, match=r"data.columns.prompt=qestion: .*; it has question, good, bad"):
        one(record, prompt="qestion")


def test_unknown_columns_and_formats_are_refused_with_what_there_is() -> None:
    with pytest.raises(ConfigError, match=r"data.columns=.*known format"):
        load({"left": "a", "right": "b"})
    with pytest.raises(ConfigError, match=r"data.format=preferences: use auto, preference"):
        load({"prompt": "a"}, format="preferences")
    with pytest.raises(ConfigError, match="cannot be imported"):
        load({"prompt": "a"}, format="data.nowhere.function")


def test_a_format_may_be_anybodys_function() -> None:
    record = {"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "\n\nHuman: a\n\nAssistant: c"}
    assert load(record, format="data.published.hh").groups


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
    write_groups(path, [group, SKY])
    assert read_groups(path) == [group, SKY]
    assert [p.name for p in path.parent.iterdir()] == ["groups.jsonl"]
    assert json.loads(path.read_text().splitlines()[0])["id"] == ASKED.id

    def fails():
        yield group
        raise RuntimeError("killed")

    with pytest.raises(RuntimeError):
        write_groups(path, fails())
    with full_disk(100), pytest.raises(OSError, match="too large"):
        write_groups(path, [group] * 100)
    assert read_groups(path) == [group, SKY]  # the old file, not half of the new one
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


LARGE = [LARGEST, -3.5e38, 10**400, -(10**400), math.nan, math.inf]
ODD = [0, -1, True, 0.5, 1e-3, 1.1e-3, *LARGE, None, "1", [1]]


@pytest.mark.parametrize("length", range(4))
def test_lists_are_checked_at_once_as_their_numbers_are_one_by_one(length: int) -> None:
    for values in map(list, itertools.product(ODD, repeat=length)):
        for most in (LARGEST, 1e-3):
            single = (isinstance(v, int | float) and -LARGEST <= v <= most for v in values)
            assert are_finite(values, most) == all(single), values


# Forms that no library asks for, and data of a kind that the loss learns nothing from


def shared(*contents: str) -> list[dict]:
    return said(*contents, role="from", content="value", names=("human", "gpt"))


Q, GOOD, BAD = "Name a colour.", "Blue.", "Seven."
SFT = Group(Prompt((Turn("user", Q),)), (Completion(GOOD),), (1.0,))
PAIR = Group(Prompt((Turn("user", Q),)), (Completion(GOOD), Completion(BAD)), (1.0, -1.0))
LED = Group(Prompt((Turn("system", "Be brief."), Turn("user", Q))), SFT.completions, SFT.rewards)
ALONE = Group(Prompt((Turn("user", Q),)))
MARKED = Group(PAIR.prompt, (Completion(BAD),), (-1.0,))


@pytest.mark.parametrize(
    ("record", "form", "group"),
    [
        # TRL's types, standard and conversational
        ({"prompt": Q, "chosen": GOOD, "rejected": BAD}, "preference", PAIR),
        (
            {"prompt": said(Q), "chosen": said("", GOOD)[1:], "rejected": said("", BAD)[1:]},
            "preference",
            PAIR,
        ),
        ({"chosen": f"{Q} {GOOD}", "rejected": f"{Q} {BAD}"}, "preference", None),
        ({"chosen": said(Q, GOOD), "rejected": said(Q, BAD)}, "preference", PAIR),
        ({"prompt": Q, "completion": BAD, "label": False}, "unpaired", MARKED),
        ({"prompt": said(Q), "completion": said("", BAD)[1:], "label": False}, "unpaired", MARKED),
        ({"prompt": Q, "completion": GOOD}, "prompt_completion", SFT),
        ({"prompt": said(Q), "completion": said("", GOOD)[1:]}, "prompt_completion", SFT),
        ({"prompt": Q}, "prompt_only", ALONE),
        ({"prompt": said(Q)}, "prompt_only", ALONE),
        ({"messages": said(Q, GOOD)}, "prompt_completion", SFT),
        # Alpaca
        ({"instruction": Q, "input": "", "output": GOOD}, "prompt_completion", SFT),
        ({"instruction": Q, "output": GOOD, "system": "Be brief."}, "prompt_completion", LED),
        ({"instruction": Q, "input": None, "chosen": GOOD, "rejected": BAD}, "preference", PAIR),
        ({"instruction": Q, "chosen": said(Q, GOOD), "rejected": said(Q, BAD)}, "preference", PAIR),
        # ShareGPT
        ({"conversations": shared(Q, GOOD)}, "prompt_completion", SFT),
        ({"conversations": said(Q, GOOD), "id": 3}, "prompt_completion", SFT),
        ({"conversations": shared(Q, GOOD), "system": "Be brief."}, "prompt_completion", LED),
        (
            {"conversations": shared(Q), "chosen": shared("", GOOD)[1], "rejected": shared("", BAD)[1]},
            "preference",
            PAIR,
        ),
        # UltraFeedback
        (
            {"instruction": Q, "chosen_response": GOOD, "rejected_response": BAD, "chosen_avg_rating": 5},
            "ultrafeedback",
            PAIR,
        ),
        (
            {
                "prompt": Q,
                "chosen": said(Q, GOOD),
                "rejected": said(Q, BAD),
                "messages": said(Q, GOOD),
                "score_chosen": 8.0,
            },
            "preference",
            PAIR,
        ),
    ],
)
def test_every_format_is_known_by_its_columns(record: dict, form: str, group: Group | None) -> None:
    before = json.dumps(record)
    loaded = load(record)
    assert not loaded.dropped and loaded.format == form and json.dumps(record) == before
    assert group is None or loaded.groups == [group]
    assert load(json.loads(before), format=form).groups == loaded.groups


def test_alpacas_input_and_history_belong_to_the_question() -> None:
    record = {"instruction": "Translate.", "input": "bleu", "output": "blue", "history": [["Hi", "Hello"]]}
    (group,) = load(record).groups
    assert [(turn.role, turn.content) for turn in group.prompt.turns] == [
        ("user", "Hi"),
        ("assistant", "Hello"),
        ("user", "Translate.\n\nbleu"),
    ]


def test_the_scores_of_ultrafeedback_are_kept() -> None:
    rated = [
        {"response": "a", "overall_score": 7.5, "model": "x"},
        {"response": "b", "overall_score": None, "fine-grained_score": 3.0},
        {"response": "c", "overall_score": None},
    ]
    for record in (
        {"instruction": Q, "completions": rated},
        {"instruction": Q, "generations": ["a", "b"], "ratings": [7.5, 3.0]},
    ):
        (group,) = load(record).groups
        assert group.rewards == (7.5, 3.0) and [c.text for c in group.completions] == ["a", "b"]


def test_a_text_is_trained_on_whole_but_for_its_first_word_and_never_through_a_template() -> None:
    for text in ("Once upon a time.", "  Once\nupon", "a b"):
        (group,) = load({"text": text}, apply_chat_template=False).groups
        assert group.prompt.turns[0].content + str(group.completions[0].text) == text
    with pytest.raises(ConfigError, match=r"language modelling.*data.apply_chat_template=false"):
        load({"text": "Once upon a time."})
    assert "fewer than two words" in load({"text": "Once"}, apply_chat_template=False).dropped[0].reason


def test_labelled_steps_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"stepwise supervision.*no loss here"):
        load({"prompt": Q, "completions": ["a", "b"], "labels": [True, False]})


def test_columns_that_nothing_reads_are_named() -> None:
    record = {"id": 1, "question": Q, "answer": GOOD, "source": "x"}
    found = load(*[record] * 80, columns={"prompt": "question", "completion": "answer"})
    assert found.unused == ("id", "source")
    assert load({"instruction": Q, "input": "", "output": GOOD, "text": "whole"}).unused == ("text",)
    assert load({"prompt": Q, "completion": GOOD, "reference": "4"}).unused == ()


@pytest.mark.parametrize(
    ("groups", "kind"),
    [
        ([ALONE, ALONE], "prompts without answers"),
        ([SFT, SFT], "single answers without labels (demonstrations)"),
        ([SFT, MARKED], "single labelled completions"),
        ([PAIR], "pairs"),
        ([Group(PAIR.prompt, PAIR.completions, (0.5, 0.25))], "scored groups"),
        ([Group(PAIR.prompt, PAIR.completions, (0.5, 0.5))], "groups whose scores are all equal"),
    ],
)
def test_the_kind_of_the_rows_has_a_name(groups: list[Group], kind: str) -> None:
    assert kind_of(groups) == kind and kind in FITTING


SUM = {"prompt": "12+34=", "completion": "46"}


@pytest.mark.parametrize(
    ("rows", "loss", "said"),
    [
        (
            [SUM | {"label": i % 2 == 0} for i in range(8)],
            "dpo",
            "rows are single labelled completions: loss=kto",
        ),
        ([SUM], "dpo", r"rows are single answers without labels \(demonstrations\): loss=sft"),
        ([{"prompt": "1+1="}] * 3, "sft", "rows are prompts without answers: online=true"),
        ([SUM | {"label": False}], "grpo", "rows are single labelled completions: loss=kto"),
    ],
)
def test_data_of_another_kind_are_named_with_the_loss_for_them(tmp_path, rows, loss, said) -> None:
    path = lines(tmp_path / "rows.jsonl", rows)
    own = (f"data.path={path}", "data.eval_fraction=0", "model.batch_size=1", "dry_run=true")
    with pytest.raises(ConfigError, match=said):
        train(make_config(f"loss={loss}", "data=local", *own), "run")


def test_the_start_shows_the_format_what_is_not_read_and_an_example(tmp_path, capsys, quick_python) -> None:
    row = {"instruction": "12+34=", "input": "", "output": "46", "id": 7}
    path = lines(tmp_path / "rows.jsonl", [row])
    own = (f"data.path={path}", "data.eval_fraction=0", "model.batch_size=1", "dry_run=true")
    train(make_config("loss=sft", "data=local", *own), "run")
    out = capsys.readouterr().out
    read = "data read as prompt_completion (instruction, input, output)"
    assert f"{read}; columns that nothing reads: id" in out
    shown = [line for line in out.splitlines() if line.startswith("first example, ")]
    assert "1 2 + 3 4 =" in shown[0] or "12+34=" in shown[0]
    assert "<eos>" in shown[1] and len(shown) == 2
    assert "### The first example, as the model reads it" in out
