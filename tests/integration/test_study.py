"""The study end to end on a plan of its own: tunes, runs, goes on after a kill, reports; quick then takes
what full chose."""

from __future__ import annotations

import json
import shutil

import pytest
import yaml

from study.__main__ import main
from study.plan import PLAN, TASKS
from study.records import read_records
from tests.tiny import ROOT

THEN = {"name": "norm", "settings": {"dpo": {"model.max_grad_norm": 1.0}}, "factors": [4.0]}
SMALL = {
    "base": {
        "model": "adder",
        "data": "adder",
        "data.eval_split": "test",
        "n_eval_prompts": 8,
        "n_eval_examples": 8,
        "model.max_length": 40,
        "sampler.max_tokens": 24,
        "log_drift": False,
        "diagnostics": False,
        "wandb.enabled": False,
    },
    "losses": {"dpo": {"loss": "dpo", "n_examples": 16, "model.batch_size": 8}},
    "variants": {"offline": {}, "offline-hl": {"humanline": True, "sync_freq": 1}},
    "exceptions": {},
    "tuning": {"seeds": [100], "metric": "eval_accuracy_sampled", "lr": [1e-4], "then": THEN, "extend": 0},
    "seeds": {"full": {"main": 2, "other": 1}, "quick": {"main": 1, "other": 1}},
    "experiments": {
        "ablation": {
            "in": ["full", "quick"],
            "cells": {"dpo-clip-only": {"like": "dpo-offline-hl", "sync_mode": "never"}},
        }
    },
}


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    folder = tmp_path_factory.mktemp("study")
    plan = folder / "plan.yaml"
    plan.write_text(yaml.safe_dump(SMALL))
    here = [
        "--plan",
        str(plan),
        "--runs-dir",
        str(folder / "runs"),
        "--out",
        str(folder / "out"),
        "--jobs",
        "2",
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("study.runner.RUNS_OF_A_PROCESS", 3)  # so that processes are replaced on the way
        assert main(["full", *here]) == 0
    return folder, here


def test_full_tunes_runs_and_reports(study):
    folder, _ = study
    names = {path.name for path in (folder / "runs").iterdir()} - {"logs"}
    assert len(names) == 4 + 4 + 1
    assert all((folder / "runs" / name / "summary.json").exists() for name in names)
    assert not list((folder / "runs").glob("*/checkpoints")), "what only an unfinished run needs is not kept"
    chosen = yaml.safe_load((folder / "chosen.yaml").read_text())["cells"]
    assert set(chosen) == {"dpo-offline", "dpo-offline-hl"}
    assert chosen["dpo-offline"]["lr"] == 1e-4 and chosen["dpo-offline"]["model.max_grad_norm"] in (1.0, 4.0)
    text = (folder / "out" / "report.md").read_text()
    assert "9 of 9 planned runs" in text and "dpo-clip-only-s1" in text
    records = {record.name: record for record in read_records(folder / "out" / "runs.jsonl")}
    assert records["dpo-offline-hl-s1"].clipped is not None and records["dpo-offline-s1"].clipped is None
    assert set(records["dpo-offline-hl-s1"].traces) == {
        "clipped_low",
        "clipped_high",
        "grad_norm",
        "loss",
        "kl",
        "reward_margin",
    }
    summary = json.loads((folder / "runs" / "dpo-offline-hl-s1" / "summary.json").read_text())
    assert summary["command"].startswith("python train.py") and "humanline=true" in summary["command"]


def test_a_study_goes_on_where_it_was_and_repeats_nothing(study, capsys):
    folder, here = study
    kept = folder / "runs" / "dpo-offline-s1" / "summary.json"
    before = kept.stat().st_mtime_ns
    lost = json.loads((folder / "runs" / "dpo-offline-s2" / "summary.json").read_text())["after"]
    shutil.rmtree(folder / "runs" / "dpo-offline-s2")
    assert main(["full", *here]) == 0
    assert kept.stat().st_mtime_ns == before
    again = json.loads((folder / "runs" / "dpo-offline-s2" / "summary.json").read_text())["after"]
    assert again == lost, "the same run gives the same numbers"


def test_records_stand_for_runs_whose_folders_are_gone(study, tmp_path):
    folder, here = study
    shutil.copy(folder / "out" / "runs.jsonl", tmp_path / "runs.jsonl")
    elsewhere = [
        *here[:2],
        "--runs-dir",
        str(tmp_path / "runs"),
        "--out",
        str(tmp_path / "out"),
        "--records",
        str(tmp_path / "runs.jsonl"),
    ]
    assert main(["full", *elsewhere]) == 0
    assert not (tmp_path / "runs").exists()
    same = [(root / "out" / "report.md").read_text().splitlines() for root in (folder, tmp_path)]
    assert [line for line in same[0] if "Made by" not in line] == [
        line for line in same[1] if "Made by" not in line
    ]


def test_quick_takes_what_full_chose_and_other_seeds(study, capsys):
    folder, here = study
    quick = [*here[:2], "--runs-dir", str(folder / "quick"), "--out", str(folder / "quick-out")]
    assert main(["quick", *quick, "--seeds", "7", "--only", "ablation"]) == 0
    assert {path.name for path in (folder / "quick").iterdir()} == {"logs", "dpo-clip-only-s7"}


def test_a_run_that_fails_is_named_and_the_others_are_done(study, capsys):
    folder, here = study
    other = [
        *here[:2],
        "--runs-dir",
        str(folder / "broken"),
        "--out",
        str(folder / "broken-out"),
        "--jobs",
        "1",
    ]
    record = folder / "broken" / "dpo-offline-s1" / "config.yaml"
    record.parent.mkdir(parents=True)
    record.write_text("lr: 1\n")  # something else lies there
    assert main(["quick", *other, "--only", "main"]) == 1
    said = capsys.readouterr().err
    assert "1 of 2 runs failed: dpo-offline-s1" in said
    assert (folder / "broken" / "dpo-offline-hl-s1" / "summary.json").exists()


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["quick", "--jobs", "0"], "--jobs"),
        (["quick", "--seeds", "a"], "--seeds"),
        (["quick", "--seeds", "1,2,1"], "--seeds"),
        (["full", "--seeds", "1,1"], "--seeds"),
        (["full", "--only", "nothing"], "--only"),
        (["full", "--records", "missing.jsonl"], "records"),
        (["quick", "--only", "nothing"], "--only"),
        (["report", "--records", "missing.jsonl"], "records"),
        (["report", "--records", str(PLAN)], "line 1"),
        (["quick", "--plan", "missing.yaml"], "--plan"),
    ],
)
def test_what_cannot_be_honoured_is_refused(words, key, tmp_path, capsys):
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(SMALL))
    (tmp_path / "chosen.yaml").write_text(
        "cells: {dpo-offline: {lr: 1e-4, model.max_grad_norm: 1.0}, "
        "dpo-offline-hl: {lr: 1e-4, model.max_grad_norm: 1.0}}\n"
    )
    here = [] if "--plan" in words else ["--plan", str(tmp_path / "plan.yaml")]
    assert main([*words, *here, "--runs-dir", str(tmp_path / "runs"), "--out", str(tmp_path / "out")]) == 2
    assert key in capsys.readouterr().err
    assert not (tmp_path / "runs").exists(), "nothing is run, nor tuned, before it is said"


PUBLISHED = ROOT / "docs" / "study"


def test_the_published_first_page_is_made_of_the_published_runs(tmp_path, monkeypatch):
    monkeypatch.setattr("study.__main__.run_all", lambda runs, *rest: pytest.fail("ran something"))
    assert main(["report", "--records", str(PUBLISHED), "--out", str(tmp_path)]) == 0
    for name in ("report.md", *(f"{task}/runs.jsonl" for task in TASKS)):
        assert (tmp_path / name).read_bytes() == (PUBLISHED / name).read_bytes(), name
    for task in TASKS:
        made, published = (
            [line for line in (folder / task / "report.md").read_text().splitlines() if "Made by" not in line]
            for folder in (tmp_path, PUBLISHED)
        )
        assert made == published, task


def test_quick_runs_what_is_tuned_and_says_what_is_not(tmp_path, monkeypatch, capsys):
    """The runs of quick are the first seeds of full: here all are known."""
    asked = []
    monkeypatch.setattr("study.__main__.run_all", lambda runs, *rest: asked.extend(runs))
    for task in TASKS:  # what full chooses is written beside the plan
        shutil.copytree(TASKS[task].parent, tmp_path / task)
        monkeypatch.setitem(TASKS, task, tmp_path / task / "plan.yaml")
    assert main(["quick", "--records", str(PUBLISHED), "--out", str(tmp_path / "both")]) == 0
    page = (tmp_path / "both" / "report.md").read_text()
    for task in TASKS:
        for loss in ("DPO", "KTO", "GRPO"):
            (row,) = (line for line in page.splitlines() if line.startswith(f"| {task} | {loss} |"))
            assert row.count("(3)") == 4, row
    capsys.readouterr()
    (tmp_path / "instruct" / "chosen.yaml").unlink()
    assert main(["quick", "--records", str(PUBLISHED), "--out", str(tmp_path / "out")]) == 0
    assert asked == []
    said = capsys.readouterr().out
    assert "(stories): not run, as its tuning is not finished (python -m study full)" in said
    page = (tmp_path / "out" / "report.md").read_text()
    assert "**Instructions with many good answers (stories)**: not run yet." in page
    assert "| adder | DPO |" in page and "(3) |" in page
    assert main(["full", "--only", "k", "--records", str(PUBLISHED), "--out", str(tmp_path / "k")]) == 0
    assert asked == [], "stories have no such experiment: they are not tuned for it"
    chosen, again = (
        yaml.safe_load((folder / "chosen.yaml").read_text()) for folder in (PLAN.parent, tmp_path / "adder")
    )
    assert chosen == again, "the rule chooses of the published runs what was chosen"
    with pytest.raises(SystemExit):
        main(["quick", "--task", "adder", "--plan", str(PLAN)])
    assert main(["quick", "--task", "instruct", "--out", str(tmp_path / "out")]) == 2
    assert "run `python -m study full`" in capsys.readouterr().err
