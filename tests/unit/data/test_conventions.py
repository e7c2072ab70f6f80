"""Formats that people bring although no library asks for them, what of a row is not read, and data of a kind
that the loss learns nothing from."""

from __future__ import annotations

import json

import pytest

from common.errors import ConfigError
from config.schema_data import DataConfig
from data.kinds import FITTING, kind_of
from data.rows import Loaded, Row
from data.sources import convert
from data.types import Completion, Group, Prompt, Turn
from tests.tiny import make_config
from train import train


def load(*records: dict, **settings: object) -> Loaded:
    rows = [Row("f.jsonl", i, record) for i, record in enumerate(records, 1)]
    return convert(rows, DataConfig(name="t", source="-", **settings), "f.jsonl")  # type: ignore[arg-type]


def said(
    *contents: str, role: str = "role", content: str = "content", names=("user", "assistant")
) -> list[dict]:
    return [{role: names[i % 2], content: text} for i, text in enumerate(contents)]


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
    loaded = load(record)
    assert not loaded.dropped and loaded.format == form
    assert group is None or loaded.groups == [group]
    assert load(json.loads(json.dumps(record)), format=form).groups == loaded.groups


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
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = (f"data.path={path}", "data.eval_fraction=0", "model.batch_size=1", "dry_run=true")
    with pytest.raises(ConfigError, match=said):
        train(make_config(f"loss={loss}", "data=local", *own), "run")


def test_the_start_shows_the_format_what_is_not_read_and_an_example(tmp_path, capsys, quick_python) -> None:
    path = tmp_path / "rows.jsonl"
    row = {"instruction": "12+34=", "input": "", "output": "46", "id": 7}
    path.write_text(json.dumps(row) + "\n")
    own = (f"data.path={path}", "data.eval_fraction=0", "model.batch_size=1", "dry_run=true")
    train(make_config("loss=sft", "data=local", *own), "run")
    out = capsys.readouterr().out
    read = "data read as prompt_completion (instruction, input, output)"
    assert f"{read}; columns that nothing reads: id" in out
    shown = [line for line in out.splitlines() if line.startswith("first example, ")]
    assert "1 2 + 3 4 =" in shown[0] or "12+34=" in shown[0]
    assert "<eos>" in shown[1] and len(shown) == 2
    assert "### The first example, as the model reads it" in out
