"""Named evaluation sets of a run: beside its own numbers and without changing them, in everything that shows
numbers, and refused before weights load."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from config.cli import compose
from config.schema import Config
from launch.pictures import in_words
from tests.tiny import ROOT
from train import train

SMALL = (
    "loss=dpo",
    "humanline=true",
    "lr=1e-3",
    "n_examples=48",
    "model.batch_size=8",
    "eval_every=16",
    "n_eval_examples=16",
    "n_eval_prompts=8",
    "wandb.enabled=false",
    "diagnostics=false",
    "report=false",
)
PAIRS = (ROOT / "assets" / "adder" / "eval_pairs.jsonl").read_text().splitlines()


def config_of(folder: Path, *more: str) -> Config:
    words = (*SMALL, f"runs_dir={folder}", f"cache_dir={folder}/cache", f"exp_name={folder.name}")
    return compose(*words, *more)[0]


def numbers(run: Path) -> list[dict]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in r.items() if k != "seconds" and "tokens_per_second" not in k} for r in lines]


def own(values: dict) -> dict:
    return {key: value for key, value in values.items() if "_same_" not in key and "_other_" not in key}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """With two runs, without further sets and with two of them: the run's own held-out rows under another
    name, and others."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "same.jsonl").write_text("\n".join(PAIRS) + "\n")
    (folder / "other.jsonl").write_text("\n".join([*PAIRS[100:116], "{"]) + "\n")
    train(config_of(folder), "plain-s1")
    train(config_of(folder, *named(folder)), "named-s1")
    return folder


def named(folder: Path) -> tuple[str, ...]:
    paths = (f"evaluations.{name}.path={folder}/{name}.jsonl" for name in ("same", "other"))
    return (*paths, "keep_best=eval_other_loss", "report=true", "keep_checkpoints=1")


def test_they_stand_beside_the_runs_own_numbers_and_change_none(folder):
    plain, both = (numbers(folder / f"{name}-s1") for name in ("plain", "named"))
    assert [own(line) for line in both] == plain
    weights = [folder / f"{name}-s1" / "model" / "model.safetensors" for name in ("plain", "named")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    after = json.loads((folder / "named-s1" / "summary.json").read_text())["after"]
    for line in (*(line for line in both if "eval_loss" in line), after):
        of_rows = ("loss", "reward_chosen", "reward_margin", "reward_accuracy", "drift")
        assert [line[f"eval_same_{key}"] for key in of_rows] == [line[f"eval_{key}"] for key in of_rows]
        assert line["eval_other_loss"] != line["eval_loss"] or line["step"] == 0
        kinds = ("accuracy_sampled", "accuracy_greedy", "length_sampled")
        assert all(line[f"eval_{name}_{kind}"] is not None for name in ("same", "other") for kind in kinds)
        assert "eval_other_kl_initial" not in line
    assert sum("eval_loss" in line for line in both) == 3


def test_they_are_in_the_report_and_the_card(folder):
    page = (folder / "named-s1" / "report.html").read_text()
    assert "other: evaluation margin" in page
    assert "other: evaluation loss" in (folder / "named-s1" / "model" / "README.md").read_text()
    assert in_words("eval_other_reward_accuracy") == "other: evaluation reward accuracy"


def test_prompts_alone_are_answered_and_labelled_rows_measured(tmp_path, monkeypatch):
    """What a set cannot give is left out: prompts have no loss, rows without a verifier no answers."""
    (tmp_path / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{i}0+11=", "reference": f"{i}1"}) + "\n" for i in range(1, 9))
    )
    words = [
        f"evaluations.asked.path={tmp_path}/prompts.jsonl",
        f"evaluations.scored={{path: {ROOT}/assets/adder/eval_pairs.jsonl, verifier: null}}",
    ]
    summary = train(config_of(tmp_path, *words, "n_examples=16"), "run")
    asked = {key for key in summary["after"] if key.startswith("eval_asked_")}
    assert asked == {f"eval_asked_{key}" for key in ("accuracy_sampled", "accuracy_greedy", "length_sampled")}
    scored = {key for key in summary["after"] if key.startswith("eval_scored_")}
    assert "eval_scored_loss" in scored and "eval_scored_accuracy_sampled" not in scored
