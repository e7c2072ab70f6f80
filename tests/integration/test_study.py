"""The study end to end on a plan of its own: it runs, goes on after a kill, repeats nothing, and a run that
fails is named."""

from __future__ import annotations

import json

import pytest
import yaml

from study.__main__ import main
from study.records import read_records

SMALL = {
    "seconds": {"adder": {"offline": 5, "online": 5}, "instruct": {"offline": 5, "online": 5}},
    "parts": {
        "main": {
            "hours": 1,
            "tuned": True,
            "seeds": [1, 2],
            "settings": {"n_eval_prompts": 8, "n_eval_examples": 8, "n_examples": 16},
            "blocks": {
                "main-sums-dpo": {"task": "adder", "loss": "dpo", "cells": {"offline": {}, "offline-hl": {}}},
                "parts-sums-dpo": {
                    "task": "adder",
                    "loss": "dpo",
                    "seeds": [1],
                    "cells": {"clip-only": {"like": "offline-hl", "sync_mode": "never"}},
                },
            },
        }
    },
}


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    folder = tmp_path_factory.mktemp("study")
    (folder / "mine.yaml").write_text(yaml.safe_dump(SMALL))
    here = [str(folder / "mine.yaml"), "--runs-dir", str(folder / "runs"), "--out", str(folder / "out")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("study.runner.RUNS_OF_A_PROCESS", 2)  # so that processes are replaced on the way
        assert main([*here, "--jobs", "2"]) == 0
    return folder, here


def test_every_run_is_in_the_page_and_a_record_that_says_how_to_repeat_it(study):
    folder, _ = study
    records = {record.name: record for record in read_records(folder / "out" / "runs.jsonl")}
    assert sorted(records) == [
        "main-sums-dpo-offline-hl-s1",
        "main-sums-dpo-offline-hl-s2",
        "main-sums-dpo-offline-s1",
        "main-sums-dpo-offline-s2",
        "parts-sums-dpo-clip-only-s1",
    ]
    assert [path.name for path in (folder / "runs").iterdir()] == ["logs"], "a record stands for its folder"
    text = (folder / "out" / "report.md").read_text()
    assert "main 5 of 5 runs" in text and "| parts-sums-dpo | clip-only − main-sums-dpo-offline-hl |" in text
    assert (folder / "out" / "main.svg").is_file()
    humanline, plain = records["main-sums-dpo-offline-hl-s1"], records["main-sums-dpo-offline-s1"]
    assert humanline.clipped is not None and plain.clipped is None
    assert {"clipped_low", "clipped_high", "grad_norm", "loss"} <= set(humanline.traces)
    assert "humanline=true" in humanline.command and humanline.commit and humanline.machine["threads"] == "1"


def test_a_study_goes_on_where_it_was_and_repeats_nothing(study):
    folder, here = study
    file = folder / "out" / "runs.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    lost = next(i for i, line in enumerate(lines) if "main-sums-dpo-offline-s2" in line)
    file.write_text("".join(lines[:lost] + lines[lost + 1 :]))
    assert main([*here, "--jobs", "1"]) == 0
    now = file.read_text().splitlines(keepends=True)
    assert now[:-1] == lines[:lost] + lines[lost + 1 :], "what was there stays"
    again, before = json.loads(now[-1]), json.loads(lines[lost])
    assert again["after"] == before["after"], "the same run gives the same numbers"


def test_records_of_another_checkout_stand_for_its_runs(study, tmp_path, monkeypatch):
    folder, here = study
    monkeypatch.setattr("study.runner.run_all", lambda *rest: pytest.fail("ran something"))
    elsewhere = [here[0], "--runs-dir", str(tmp_path / "runs"), "--out", str(tmp_path / "out")]
    assert main([*elsewhere, "--records", str(folder / "out" / "runs.jsonl")]) == 0
    assert (tmp_path / "out" / "report.md").read_bytes() == (folder / "out" / "report.md").read_bytes()


def test_a_run_that_fails_is_named_and_the_others_are_done(study, capsys):
    folder, here = study
    words = [
        here[0],
        "--runs-dir",
        str(folder / "broken"),
        "--out",
        str(folder / "broken-out"),
        "--jobs",
        "1",
    ]
    record = folder / "broken" / "main-sums-dpo-offline-s7" / "config.yaml"
    record.parent.mkdir(parents=True)
    record.write_text("lr: 1\n")  # something else lies there
    assert main([*words, "--seeds", "7", "--only", "main-sums-dpo"]) == 1
    said = capsys.readouterr().err
    assert "failed: main-sums-dpo-offline-s7; logs in" in said
    assert [r.name for r in read_records(folder / "broken-out" / "runs.jsonl")] == [
        "main-sums-dpo-offline-hl-s7"
    ]
