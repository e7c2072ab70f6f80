"""The published sets: small rows of the hub's own schema, and the real files where they lie beside the
repository."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from statistics import fmean

import pytest
from hydra import compose, initialize_config_dir

from config.schema_data import DataConfig
from config.sections import typed
from data.detection import FORMATS, OF_COLUMNS
from data.rows import Loaded, Row
from data.sources import convert, load_groups
from tests.unit.data.people import ROWS, words

CONFIG = Path(__file__).parents[3] / "config"
REAL = Path(__file__).parents[4] / "shared" / "data"
SETS = sorted(
    path.stem for path in (CONFIG / "data").glob("*.yaml") if "source: data.sources." in path.read_text()
)


def shipped(name: str, *overrides: str) -> DataConfig:
    """config/data/NAME.yaml as the command line composes it."""
    with initialize_config_dir(str(CONFIG / "data"), version_base=None):
        raw = compose(name, overrides=list(overrides))
    return typed(raw, DataConfig)


def load(name: str, *records: dict, **settings: object) -> Loaded:
    config = dataclasses.replace(shipped(name, "path=x"), **settings)  # type: ignore[arg-type]
    return convert([Row("f", i, record) for i, record in enumerate(records, 1)], config, "f")


@pytest.mark.parametrize("name", SETS)
def test_every_shipped_yaml_names_a_format(name: str) -> None:
    assert shipped(name, "path=x").format in (*OF_COLUMNS, *FORMATS)


def test_shp_wants_twice_the_votes_and_at_most_five_pairs() -> None:
    row = {"history": "q", "human_ref_A": "a", "human_ref_B": "b", "score_A": 9, "score_B": 3, "labels": 1}
    other = row | {"labels": 0, "score_A": 3, "score_B": 9}
    assert [answers for _, answers, _ in words(load("shp", row, other))] == [["a", "b"], ["b", "a"]]
    loaded = load("shp", row | {"score_B": 5}, *[row] * 7, row | {"history": "r"})
    assert len(loaded.groups) == 6 and [d.row for d in loaded.dropped] == [1, 7, 8]


def test_checkable_maths_has_the_asked_form_and_what_lacks_it_is_dropped() -> None:
    sets = {of["name"]: of["row"] for of in ROWS["sets"]}
    asked = load("gsm8k", sets["gsm8k"], system_prompt="think_answer").groups[0].completions[0].text
    steps = "<think>\nIt is 500 * 2 = <<500*2=1000>>1000.\n</think>\n"
    assert asked == f"{steps}<answer>\n1000\n</answer>"
    assert "####" in load("gsm8k", {"question": "q", "answer": "no mark"}, sets["gsm8k"]).dropped[0].reason


OASST = """
root - prompter - en
worst root assistant 2 en
best root assistant 0 en
mid root assistant 1 en
next best prompter - en
a next assistant 1 en
b next assistant 0 en
alone mid prompter - en
x alone assistant - en
de - prompter - de
lost1 gone assistant 0 en
lost2 gone assistant 1 en
"""


def test_oasst_pairs_each_answer_with_the_next_worse_sibling() -> None:
    keys, messages = ("message_id", "parent_id", "role", "rank", "lang"), []
    for line in OASST.strip().splitlines():
        row = {key: None if word == "-" else word for key, word in zip(keys, line.split(), strict=True)}
        rank = None if row["rank"] is None else int(row["rank"])
        messages.append(row | {"rank": rank, "text": f"text {row['message_id']}"})
    loaded = load("oasst", *messages, {"lang": "en"})
    assert words(loaded) == [
        (["text root"], ["text best", "text mid"], (1.0, -1.0)),
        (["text root"], ["text mid", "text worst"], (1.0, -1.0)),
        (["text root", "text best", "text next"], ["text b", "text a"], (1.0, -1.0)),
    ]
    assert [(d.row, d.reason) for d in loaded.dropped] == [
        (10, "not in English"),
        (13, "no column 'message_id'"),
        (12, "a message of the conversation is missing"),
    ]


@pytest.mark.parametrize("of", ROWS["sets"], ids=lambda of: of["name"])
def test_a_set_is_read_as_the_hub_has_it(of: dict) -> None:
    prompt, answers, rewards = of["group"]
    loaded = load(of["name"], of["row"])
    assert words(loaded) == [(prompt, answers, tuple(map(float, rewards)))]
    assert loaded.groups[0].prompt.reference_answer == of.get("reference")


# The real files


REAL_FILES = {  # -> rows, groups
    "hh hh_harmless_test.jsonl.gz": (2312, 2303),
    "alpacaeval alpacaeval_annotations_gpt35_turbo_0301.json": (805, 804),
    "gsm8k gsm8k_train.jsonl": (7473, 7473),
    "gsm8k_solutions gsm8k_model_solutions.jsonl.gz": (1319, 1319),
}


@pytest.mark.parametrize(("file", "counts"), REAL_FILES.items())
def test_a_real_file_is_read(file: str, counts: tuple[int, int]) -> None:
    name, path = file.split()
    if not (REAL / path).is_file():
        pytest.skip(f"the real file {path} is not beside the repository (../shared/data)")
    loaded = load_groups(shipped(name, f"path={REAL / path}", "eval_path=null", "eval_fraction=0"), "train")
    assert (loaded.read, len(loaded.groups)) == counts
    if name == "gsm8k_solutions":
        shares = [100 * fmean(g.rewards[i] for g in loaded.groups) for i in range(4)]
        assert shares == pytest.approx([21.7, 39.0, 34.7, 56.3], abs=0.05)
