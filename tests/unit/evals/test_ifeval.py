"""IFEval: what is followed, strictly and loosely; what cannot be checked without data is left out and
said."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from common.errors import ConfigError, DataError
from config.schema_eval import EvalStage, IfevalConfig
from evals import ifeval

ROWS = [
    ("Rain, in 5 words or more, no comma.", ["punctuation:no_comma", "length_constraints:number_words"],
     [{}, {"relation": "at least", "num_words": 5}]),
    ("Antworte auf Deutsch.", ["language:response_language"], [{"language": "de"}]),
    ("Write three sentences.", ["length_constraints:number_sentences"],
     [{"relation": "at least", "num_sentences": 3}]),
    ('End with "Bye".', ["startend:end_checker"], [{"end_phrase": "Bye"}]),
]  # fmt: skip
TEXTS = [
    "rain, and more rain",
    "Der Regen fällt heute leise auf die alten Dächer der Stadt.",
    "One. Two. Three.",
    "**Bye**",
]


def rows() -> list[dict]:
    keys = ("key", "prompt", "instruction_id_list", "kwargs")
    return [dict(zip(keys, (i, *row), strict=True)) for i, row in enumerate(ROWS)]


def test_rates_are_those_of_the_checkers_and_nothing_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    import nltk

    monkeypatch.setattr(nltk, "download", lambda *_, **__: pytest.fail("asked the network"))
    checked, left_out = ifeval.followed(rows(), TEXTS)
    assert [one["strict"] for one in checked[:2]] == [[False, False], [True]]
    assert checked[3] == {"strict": [False], "loose": [True]}
    assert left_out or checked[2]["strict"] == [True]
    assert ifeval.rates_of(checked[:2])["instruction_strict"] == pytest.approx(1 / 3)
    assert ifeval.rates_of(checked[3:])["mean"] == 0.5


def test_what_the_checkers_draw_is_the_same_each_time_and_in_both_ways() -> None:
    """One of the 541 prompts asks for the letter '#', for which lm-eval draws any."""
    wanted = [{"letter": "#", "let_frequency": 2, "let_relation": "at least"}]
    row = dict(rows()[0], instruction_id_list=["keywords:letter_frequency"], kwargs=wanted)
    random.seed(1)
    state = random.getstate()
    checked, _ = ifeval.followed([row] * 40, ["aabbccddeeffgg #"] * 40)
    assert len({one[how][0] for one in checked for how in ("strict", "loose")}) == 1
    assert random.getstate() == state


def test_what_needs_data_that_is_not_there_is_left_out_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nltk.data.path", [])
    monkeypatch.setattr(ifeval, "PUNKT", Path("nowhere"))
    checked, left_out = ifeval.followed(rows(), TEXTS)
    assert checked[2] == {"strict": [], "loose": []} and left_out == {
        "length_constraints:number_sentences": 1
    }
    assert ifeval.rates_of(checked)["prompt_strict"] == pytest.approx(1 / 3)


def test_the_prompts_are_a_file_s(tmp_path: Path) -> None:
    path = tmp_path / "input_data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows()))
    stage = EvalStage(kind="ifeval", limit=2, ifeval=IfevalConfig(path=str(path)))
    assert len(ifeval.questions(stage)) == 2
    with pytest.raises(ConfigError, match=r"ifeval\.path.*no such file"):
        ifeval.questions(EvalStage(kind="ifeval", ifeval=IfevalConfig(path="none.jsonl")))
    path.write_text('{"prompt": "Hi"}\n')
    with pytest.raises(DataError, match="lacks what IFEval's have"):
        ifeval.questions(stage)
