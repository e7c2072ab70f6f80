"""The results table: statistics against scipy and by hand, choosing on validation alone, nothing dropped."""

from __future__ import annotations

import csv
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import yaml  # type: ignore[import-untyped]
from scipy import stats

from config.load import dump
from launch import results, status
from launch.collect import cells_of, of_folders
from reports.statistics import SeedMean, compare
from tests.tiny import compose_config

METRIC = "eval_accuracy_sampled"


def finish(runs: Path, name: str, value: float | None, *overrides: str, test: float | None = None) -> Path:
    """A run folder as train.py leaves it; ``value`` None: killed after four steps. Runs that differ by their
    names and seeds are composed once."""
    (folder := runs / name).mkdir(parents=True)
    alone = {word.partition("=")[0]: word.partition("=")[2] for word in overrides}
    shared = [word for word in overrides if not word.startswith(("exp_name=", "seed="))]
    own = {"exp_name": name, "seed": int(alone.get("seed", 1))}
    (folder / "config.yaml").write_text(dump(replace(compose_config(shared), **own)))
    lines = [{"step": s, "examples": 32 * (s + 1), "loss": 1 / (s + 1)} for s in range(4)]
    lines[0][METRIC] = 0.5
    whole = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(whole + '{"step": 4, "lo')
    if value is not None:
        summary = {"before": {METRIC: 0.5}, "after": {METRIC: value, "eval_loss": None}}
        summary |= {"seconds": 60.0, "examples": 128, "steps": 4}
        (folder / "summary.json").write_text(json.dumps(summary))
    if test is not None:
        (folder / "evals").mkdir()
        found = {"settings": {"n": 5}, "pass@1": test, "items": [1, 2], "ok": True}
        (folder / "evals" / "test.json").write_text(json.dumps(found))
    return folder


def failed(logs: Path, name: str, said: str = "") -> Path:
    """The log of a run of sweep ``s`` that was refused."""
    log = logs / "s" / f"{name}.7.out"
    log.parent.mkdir(parents=True, exist_ok=True)
    start = f"[2026-11-21 19:04:49 {name}, job 7_0, start 1]"
    log.write_text(f"{start} on n1\n{said}\n{start} exit code 2\n")
    return log


def table(tmp_path: Path, *words: str, code: int = 0) -> Path:
    """``python -m launch.results`` of all runs; returns the folder of its files."""
    out = tmp_path / "o"
    assert results.main([str(tmp_path / "runs"), "--out", str(out), *words]) == code
    return out


def test_pairs_are_of_the_same_seed() -> None:
    found = compare({"a": {1: 0.1, 2: 0.2, 3: 0.3}, "b": {2: 0.4, 3: 0.6, 9: 5.0}, "c": {1: 1.0}})
    assert [(c.a, c.b, c.difference.n) for c in found] == [("a", "b", 2)], "one seed in common is no test"
    assert found[0].difference.value == pytest.approx(0.25)
    cells = {"a": {1: 0.1, 2: 0.2}, "b": {1: 0.4, 2: 0.6}, "c": {1: 1.0, 2: 0.0}}
    assert [(c.a, c.b) for c in compare(cells, baseline="b")] == [("b", "a"), ("b", "c")]


def test_best_setting_is_chosen_on_validation_and_never_on_test(tmp_path: Path) -> None:
    for lr, validation, test in ((1e-4, 0.6, 0.1), (1e-3, 0.5, 0.9)):
        for seed in (1, 2):
            name = f"x-dpo-lr{lr}-s{seed}"
            finish(tmp_path / "runs", name, validation, f"lr={lr}", f"seed={seed}", test=test)
    cells = cells_of(of_folders([tmp_path / "runs"]), ["lr"], METRIC)
    assert [(cell.name, cell.selected, len(cell.tried)) for cell in cells] == [("x-dpo", {"lr": 1e-4}, 2)]
    assert cells[0].mean("test/pass@1") == SeedMean(0.1, 0.0, 2), (
        "the better test score belongs to the setting that was not chosen"
    )
    table(tmp_path, "--select", "lr", "--validation", "test/pass@1", code=2)


def test_unfinished_and_unstarted_runs_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = tmp_path / "runs"
    sweep = {"base": {"runs_dir": str(runs)}, "grid": {"loss": ["dpo", "kto"]}, "seeds": [1, 2, 3]}
    (tmp_path / "s.yaml").write_text(yaml.safe_dump(sweep))
    base = [f"runs_dir={runs}", "wandb.tags=[s,s-dpo]"]
    finish(runs, "s-dpo-s1", 0.6, "loss=dpo", "seed=1", *base)
    finish(runs, "s-dpo-s2", None, "loss=dpo", "seed=2", *base)
    log = failed(tmp_path / "logs", "s-kto-s1", "error: lr=-1: must be <above> 0")
    given = [str(tmp_path / "s.yaml"), "--out", str(tmp_path / "o"), "--logs", str(tmp_path / "logs")]
    assert results.main(given) == 0
    said = capsys.readouterr().out
    assert "| s-dpo | 1/3, s2 interrupted at step 4, s3 not started | 0.6 |" in said
    assert "| s-kto | 0/3, s1 failed, s2 not started, s3 not started | – |" in said
    assert f"s-kto-s1 failed: `error: lr=-1: must be <above> 0` ({log})" in said
    rows = list(csv.DictReader((tmp_path / "o" / "runs.csv").open()))
    kinds = ["finished", "interrupted", "not started", "failed", "not started", "not started"]
    assert [row["status"] for row in rows] == kinds
    assert (rows[3]["said last"], rows[3]["log"]) == ("error: lr=-1: must be <above> 0", str(log))
    page = (tmp_path / "o" / "index.html").read_text()
    assert "lr=-1: must be &lt;above&gt; 0" in page
    assert page.count("<svg") == 2, "one overview, a curve of the cell that has begun"
    assert status.main([given[0], *given[3:]]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[3].split(maxsplit=1) == ["s-kto-s1", f"failed: error: lr=-1: must be <above> 0 ({log})"]
    assert lines[6:] == ["6 runs: 1 finished, 1 interrupted, 3 not started, 1 failed"]


def test_the_power_is_that_of_as_many_tests_as_are_said(tmp_path, capsys):
    for k, cell in enumerate("abc"):
        for seed in (1, 2):
            name = f"x-{cell}-s{seed}"
            finish(tmp_path / "runs", name, 0.5 + k * seed / 10, f"lr={k + 1}e-4", f"seed={seed}")
    for words, tests in (((), 3), (("--tests", "1"), 1), (("--tests", "12"), 12)):
        table(tmp_path, "--power", "0.2", *words)
        assert f"| power at 0.05/{tests} |" in capsys.readouterr().out


def test_a_table_that_would_say_less_than_asked_is_refused(tmp_path, monkeypatch, capsys):
    for folder in ("runs", "again"):
        finish(tmp_path / folder, "a-s1", 0.5, "loss=dpo", "seed=1")
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    for words, said in {
        "runs --metric nosuch": "--metric=nosuch: is a number of no finished run; there are eval_acc",
        "runs --select loss": "--select=loss: is a setting of no run; there are loss.",
        "runs --power inf": "--power=inf: is a difference above 0",
        "runs again": "runs=a-s1: and a-s1 have the same settings, seed 1 too",
        "runs --out file/x": "file/x: Not a directory",
    }.items():
        assert results.main(words.split()) == 2
        assert said in (told := capsys.readouterr()).err and not told.out


def test_the_table_is_the_raw_numbers(tmp_path: Path) -> None:
    """And the page says below "Tests" how it tested."""
    values = {"dpo": [0.50, 0.60, 0.70], "kto": [0.55, 0.55, 0.85]}
    for loss, scores in values.items():
        for seed, value in enumerate(scores, start=1):
            finish(tmp_path / "runs", f"s-{loss}-s{seed}", value, f"loss={loss}", f"seed={seed}")
    out = table(tmp_path)
    for row in csv.DictReader((out / "table.csv").open()):
        raw = np.array(values[row["cell"].split("-")[1]])
        assert float(row[f"{METRIC} mean"]) == pytest.approx(raw.mean())
        assert float(row[f"{METRIC} se"]) == pytest.approx(raw.std(ddof=1) / math.sqrt(3))
    page = (out / "index.html").read_text()
    assert page.count("<svg") == 3, "the cells, and each cell's curve"
    assert (out / "overview.svg").read_text() in page and ElementTree.parse(out / "overview.svg")
    assert "<h2>Tests</h2>\n<p>Tests: " in page
    p = stats.ttest_rel(values["kto"], values["dpo"]).pvalue
    assert f"{p:.4f}" in (out / "table.md").read_text()


def test_cells_that_were_not_measured_alike_are_told_apart(tmp_path: Path) -> None:
    few = ("n_eval_prompts=4", "data.eval_split=test")
    for name, words in {"a-s1": (), "b-s1": few, "c-s1": few, "d-s1": ("n_eval_prompts=2",)}.items():
        value = None if name == "d-s1" else 0.5
        finish(tmp_path / "runs", name, value, "seed=1", f"lr=1e-{ord(name[0]) - 94}", *words)
    out = table(tmp_path)
    split, prompts = "data.eval_split is None in a, test in b, c", "n_eval_prompts is None in a, 4 in b, c"
    for file in ("table.md", "index.html"):
        assert f"Not measured alike: {split}; {prompts}." in (out / file).read_text()
    for name in ("a-s1", "d-s1"):
        shutil.rmtree(tmp_path / "runs" / name)
    assert "Not measured alike" not in (table(tmp_path) / "table.md").read_text()


def test_a_damaged_file_is_named(tmp_path: Path, capsys) -> None:
    folder = finish(tmp_path / "runs", "s-s1", 0.5, "seed=1", test=0.5)
    for name in ("config.yaml", "summary.json", "metrics.jsonl", "evals/test.json"):
        sound = (folder / name).read_bytes()
        (folder / name).write_bytes(b'{"a": \xff}\n')
        table(tmp_path, code=2)
        said = ", line 1 is not a line of metrics" if name == "metrics.jsonl" else " is damaged"
        assert f"{folder / name}{said}" in capsys.readouterr().err
        (folder / name).write_bytes(sound)
