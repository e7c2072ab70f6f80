"""The published sets: small rows of the hub's own schema, and the real files where they lie beside the
repository."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from config.schema_data import DataConfig
from config.sections import typed
from data.chat import Renderer
from data.detection import FORMATS
from data.published import SOLVERS, transcript
from data.rows import Loaded, Row
from data.sources import convert, load_groups
from data.templates import load_template
from data.types import Sequence
from tests.tiny_tokenizers import tiny_tokenizer
from tests.unit.data.people import said

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


def words(loaded: Loaded) -> list[tuple[list[str], list[str | None], tuple[float, ...]]]:
    return [
        ([t.content for t in g.prompt.turns], [c.text for c in g.completions], g.rewards)
        for g in loaded.groups
    ]


@pytest.mark.parametrize("name", SETS)
def test_every_shipped_yaml_is_whole_and_says_what_it_is(name: str) -> None:
    path = CONFIG / "data" / f"{name}.yaml"
    config = shipped(name, "path=x")
    assert config.name == name
    assert path.read_text().startswith("# ")
    assert config.format == "auto" or config.format in FORMATS
    assert shipped(name, "path=x", "eval_fraction=0.5", "columns={prompt: q}", "format=auto").columns == {
        "prompt": "q"
    }


def test_no_setting_of_the_schema_is_missing_from_the_base_yaml() -> None:
    assert set(OmegaConf.load(CONFIG / "data" / "_base.yaml")) == {
        field.name for field in dataclasses.fields(DataConfig)
    }


ARMORM = {
    "prompt": "q",
    "chosen": said("q", "a"),
    "rejected": said("q", "b"),
    "all_generated_responses": ["a", "c", "b"],
    "all_rm_scores": [0.2, 0.15, 0.1],
}


@pytest.mark.parametrize("name", [name for name in SETS if name.startswith("ultrafeedback")])
def test_ultrafeedback(name: str) -> None:
    more = {"prompt_id": "1", "messages": said("q", "a"), "score_chosen": 8.0, "score_rejected": 2.0}
    assert words(load(name, ARMORM | more)) == [(["q"], ["a", "b"], (1.0, -1.0))]


def test_the_scores_of_all_armorm_answers_can_be_used_too() -> None:
    columns = {"completions": "all_generated_responses", "rewards": "all_rm_scores"}
    loaded = load("ultrafeedback_armorm", ARMORM, format="groups", columns=columns)
    assert words(loaded) == [(["q"], ["a", "c", "b"], (0.2, 0.15, 0.1))]


def test_ultrachat() -> None:
    loaded = load("ultrachat", {"prompt": "q", "prompt_id": "1", "messages": said("q", "a", "r", "b")})
    assert words(loaded) == [(["q", "a", "r"], ["b"], (1.0,))]


def test_hh() -> None:
    start = "\n\nHuman: hello\n\nAssistant: hi\n\nHuman: and?\n\nAssistant: "
    loaded = load(
        "hh",
        {"chosen": start + "yes", "rejected": start + "no"},
        {"chosen": start + "yes", "rejected": "\n\nHuman: bye\n\nAssistant: no"},
        {
            "chosen": "\n\nHuman: a\n\nHuman: b\n\nAssistant: c",
            "rejected": "\n\nHuman: a\n\nHuman: b\n\nAssistant: d",
        },
    )
    assert words(loaded) == [(["hello", "hi", "and?"], ["yes", "no"], (1.0, -1.0))]
    assert [d.reason for d in loaded.dropped] == [
        "chosen and rejected answer different conversations",
        "the turns of the transcript do not alternate",
    ]
    assert [t.role for t in transcript(start + "yes")] == ["user", "assistant", "user", "assistant"]


def test_alpacaeval_judgements_and_outputs() -> None:
    judged = {"instruction": "q", "output_1": "one", "output_2": "two"}
    judged |= {"generator_1": "g", "generator_2": "h"}
    preferences = (1.0, 1.49, 1.51, 2, 1.5, float("nan"), None, 0.2)
    loaded = load("alpacaeval", *({**judged, "preference": p} for p in preferences))
    assert [c for _, c, _ in words(loaded)] == [["one", "two"]] * 2 + [["two", "one"]] * 2
    assert loaded.dropped[0].reason == "a tie"
    assert len(loaded.dropped) == 4
    output = {"instruction": "q", "output": "a", "generator": "g", "dataset": "koala"}
    outputs = load("alpacaeval", output, format="auto")
    assert words(outputs) == [(["q"], ["a"], (1.0,))]


def test_checkable_maths_has_its_reference_and_the_asked_form() -> None:
    grade = {"question": "q", "answer": "It is 500 * 2 = <<500*2=1000>>1000.\n#### 1,000"}
    plain, asked = (
        load("gsm8k", grade, {"question": "q", "answer": "no mark"}),
        load("gsm8k", grade, system_prompt="think_answer"),
    )
    assert plain.groups[0].prompt.reference_answer == "1000"
    assert plain.groups[0].completions[0].text == grade["answer"]
    assert "####" in plain.dropped[0].reason
    assert asked.groups[0].completions[0].text == (
        "<think>\nIt is 500 * 2 = <<500*2=1000>>1000.\n</think>\n<answer>\n1000\n</answer>"
    )
    hard = {"problem": "p", "solution": r"so $\boxed{\frac{1}{2}}$.", "answer": r"\frac{1}{2}"}
    (group,) = load("math", hard | {"subject": "Algebra", "level": 3, "unique_id": "a.json"}).groups
    assert group.prompt.reference_answer == hard["answer"]
    worked = f"<think>\n{hard['solution']}\n</think>\n<answer>\n{hard['answer']}\n</answer>"
    assert group.completions[0].text == worked


@pytest.mark.parametrize("name", ["shp", "local"])
def test_shp_wants_twice_the_votes_and_at_most_five_pairs(name: str) -> None:
    row = {"history": "q", "human_ref_A": "a", "human_ref_B": "b", "score_A": 9, "score_B": 3, "labels": 1}
    row["score_ratio"] = 3.0
    assert words(load(name, row, {**row, "labels": 0, "score_A": 3, "score_B": 9})) == [
        (["q"], ["a", "b"], (1.0, -1.0)),
        (["q"], ["b", "a"], (1.0, -1.0)),
    ]
    loaded = load(name, {**row, "score_B": 5}, *[row] * 7, {**row, "history": "r"})
    assert len(loaded.groups) == 6
    assert [d.row for d in loaded.dropped] == [1, 7, 8]


@pytest.mark.parametrize("name", ["oasst", "local"])
def test_oasst_pairs_each_answer_with_the_next_worse_sibling(name: str) -> None:
    def message(own: str, parent: str | None, role: str, rank: int | None = None, lang: str = "en") -> dict:
        where = {"message_id": own, "parent_id": parent, "rank": rank}
        return where | {"role": role, "lang": lang, "text": f"text {own}"}

    loaded = load(
        name,
        message("root", None, "prompter"),
        message("worst", "root", "assistant", 2),
        message("best", "root", "assistant", 0),
        message("mid", "root", "assistant", 1),
        message("next", "best", "prompter"),
        message("a", "next", "assistant", 1),
        message("b", "next", "assistant", 0),
        message("alone", "mid", "prompter"),
        message("x", "alone", "assistant"),
        message("de", None, "prompter", None, "de"),
        message("lost1", "gone", "assistant", 0),
        message("lost2", "gone", "assistant", 1),
        {"lang": "en"},
    )
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


def test_the_rest() -> None:
    safe = {"prompt": "q", "response_0": "a", "response_1": "b", "better_response_id": 1}
    assert words(load("safe_rlhf", safe, {**safe, "better_response_id": 0})) == [
        (["q"], ["b", "a"], (1.0, -1.0)),
        (["q"], ["a", "b"], (1.0, -1.0)),
    ]
    thought = {"deepseek_thinking_trajectory": "hm\n", "deepseek_attempt": "42"}
    assert words(load("s1k", {"question": "q", "solution": "s"} | thought))[0][1] == [
        "<think>\nhm\n</think>\n<answer>\n42\n</answer>"
    ]
    wild = {
        "conversation_input": [
            {**turn, "language": "English", "toxic": False} for turn in said("q", "a", "r")
        ],
        "references": {"gpt-4": "b"},
        "checklist": ["c"],
        "session_id": "s",
    }
    assert words(load("wildbench", wild, {**wild, "references": {"gpt-4": None}})) == [
        (["q", "a", "r"], ["b"], (1.0,)),
        (["q", "a", "r"], [], ()),
    ]


def test_gsm8k_solutions_are_groups_of_four_with_verdicts() -> None:
    solvers = {name: {"solution": f"by {name}", "is_correct": name.startswith("175b")} for name in SOLVERS}
    row = {"question": "q", "ground_truth": "1,000 + 2\nA: 1,002", **solvers}
    (group,) = load("gsm8k_solutions", row).groups
    assert group.prompt.reference_answer == "1002"
    assert [c.text for c in group.completions] == [f"by {name}" for name in SOLVERS]
    assert group.rewards == (0.0, 0.0, 1.0, 1.0)
    missing = load("gsm8k_solutions", {**row, "6b_verification": "x"}, row)
    assert [d.reason for d in missing.dropped] == ["'6b_verification' is a str, not an object"]


def test_a_published_set_can_be_a_local_copy(tmp_path) -> None:
    path = tmp_path / "copy.jsonl"
    path.write_text("\n".join(f'{{"question": "q{i}", "answer": "#### {i}"}}' for i in range(20)))
    config = shipped("gsm8k", f"path={path}")
    assert config.eval_split == "test"  # the hub's, which a local file does not have
    train, held_out = load_groups(config, "train"), load_groups(config, "eval")
    assert (len(train.groups), len(held_out.groups)) == (19, 1)


# The real files


def real(name: str) -> Path:
    path = REAL / name
    if not path.is_file():
        pytest.skip(f"the real file {name} is not beside the repository (../shared/data)")
    return path


def test_the_real_hh_file() -> None:
    config = shipped("hh", f"path={real('hh_harmless_test.jsonl.gz')}")
    train, held_out = load_groups(config, "train"), load_groups(config, "eval")
    assert train.read == 2312
    assert len(train.groups) + len(held_out.groups) + len(train.dropped) == 2312
    assert len(train.dropped) < 20
    assert not {g.prompt.id for g in train.groups} & {g.prompt.id for g in held_out.groups}
    assert all(g.prompt.turns[-1].role == "user" and g.rewards == (1.0, -1.0) for g in train.groups)
    assert max(len(g.prompt.turns) for g in train.groups) > 5
    tokenizer = tiny_tokenizer("llama3")
    make = Renderer(tokenizer, max_length=1024, max_prompt_length=512, template=load_template(tokenizer))
    made = make.sequences([(g.prompt, c) for g in train.groups for c in g.completions])
    assert all(isinstance(row, Sequence) for row in made)
    assert max(len(row) for row in made) <= 1024
    ends = sum(int(row.completion_ids[-1] == make.end_id) for row in made if isinstance(row, Sequence))
    assert ends == len(made) - make.cuts["completion end"]
    first, text = next(
        (row, g) for row, g in zip(made[::2], train.groups, strict=True) if isinstance(row, Sequence)
    )
    assert text.completions[0].text in tokenizer.decode(np.array(first.completion_ids))


def test_the_real_alpacaeval_judgements() -> None:
    config = shipped(
        "alpacaeval", f"path={real('alpacaeval_annotations_gpt35_turbo_0301.json')}", "eval_fraction=0"
    )
    loaded = load_groups(config, "train")
    assert loaded.read == 805
    assert (len(loaded.groups), [d.reason for d in loaded.dropped]) == (804, ["a tie"])


def test_the_real_gsm8k_files() -> None:
    files = f"path={real('gsm8k_train.jsonl')}", f"eval_path={real('gsm8k_test.jsonl')}"
    config = shipped("gsm8k", *files, "system_prompt=think_answer")
    train, test = load_groups(config, "train"), load_groups(config, "eval")
    assert (len(train.groups), len(test.groups), train.dropped) == (7473, 1319, [])
    assert all(
        g.prompt.reference_answer and float(g.prompt.reference_answer) == float(g.prompt.reference_answer)
        for g in train.groups
    )
    assert all(g.prompt.turns[0].role == "system" for g in test.groups)


def test_the_real_gsm8k_solutions() -> None:
    config = shipped("gsm8k_solutions", f"path={real('gsm8k_model_solutions.jsonl.gz')}", "eval_fraction=0")
    loaded = load_groups(config, "train")
    assert (len(loaded.groups), loaded.dropped) == (1319, [])
    assert sum(0 < sum(g.rewards) < 4 for g in loaded.groups) == 731
    shares = [100 * fmean(g.rewards[i] for g in loaded.groups) for i in range(4)]
    assert shares == pytest.approx([21.7, 39.0, 34.7, 56.3], abs=0.05)
    answers = [float(g.prompt.reference_answer or "nan") for g in loaded.groups]
    assert len([a for a in answers if a == a]) == 1319
