"""The report: every number in it comes from a record, records read back as they were written, and what was
not run is said."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace

import numpy as np
import pytest

from common.errors import ConfigError
from launch.grid import Run
from study.__main__ import main
from study.plan import FULL, PLAN, QUICK, TASKS, read_plan
from study.records import FACTS, Record, collect, command, read_records, write_records
from study.report import write_report

PLANNED = read_plan()
CHOSEN = {cell: dict(zip(PLANNED.tuned(cell), (1e-4, 0.3), strict=True)) for cell in PLANNED.main}
LEVELS = {"grpo-offline": 0.6, "grpo-offline-hl": 0.8, "dpo-offline-hl": 0.5}


def record(run: Run) -> Record:
    rng = np.random.default_rng([run.seed, *run.cell.encode()])
    value = LEVELS.get(run.cell, 0.7) + rng.normal(0, 0.01)
    after = {
        "eval_accuracy_sampled": value,
        "eval_accuracy_greedy": min(1.0, value + 0.1),
        "eval_drift": -0.1,
    }
    before = {"eval_accuracy_sampled": 0.49, "eval_accuracy_greedy": 0.54}
    return Record(
        run.name,
        run.cell,
        run.seed,
        [f"seed={run.seed}", f"sync_freq={run.settings.get('sync_freq', 1)}"],
        before,
        after,
        160,
        1280,
        {"train": 8.0, "sample": 20.0 if run.settings.get("online") else 0.0, "cpu": 15.0, "wall": 20.0},
        {"loss": 0.5},
        [(0, 0.49), (1024, 0.6)],
        0.01 if run.settings.get("humanline") else None,
    )


def made(tmp_path, mode, wanted=lambda run: True):
    runs = PLANNED.runs(mode, CHOSEN)
    records = [record(run) for run in runs if wanted(run)]
    printed = write_report(PLANNED, mode, CHOSEN, records, len(runs), tmp_path, "python -m study " + mode)
    return records, (tmp_path / "report.md").read_text(), printed.said


def test_everything_that_was_run_is_in_the_report(tmp_path):
    records, text, printed = made(tmp_path, FULL)
    for stem in (
        "figure1",
        "figure5",
        "figure6",
        "figure7",
        "figure8",
        "figure10",
        "figure11",
        "table6",
        "controls",
    ):
        assert (tmp_path / f"{stem}.svg").read_bytes().startswith(b"<?xml") and f"({stem}.svg)" in text
        assert stem.replace("figure", "Figure ").replace("table", "Table ").capitalize() in text
    for one in records:
        assert f"{one.name}: {100 * one.after['eval_accuracy_sampled']:.1f}" in text
    assert "not run" not in re.sub("counts as not run", "", text)
    assert f"{len(records)} of {len(records)} runs" in printed


def test_the_claims_follow_the_numbers(tmp_path):
    _, text, _ = made(tmp_path, FULL)
    rows = [
        line
        for line in text.splitlines()
        if "better than grpo-offline |" in line or "better than dpo-offline |" in line
    ]
    by_pair = {row.split(" | ")[2]: row for row in rows}
    assert (
        "seen |" in by_pair["grpo-offline-hl better than grpo-offline"]
        and "+2" in by_pair["grpo-offline-hl better than grpo-offline"]
    )
    assert by_pair["dpo-offline-hl better than dpo-offline"].rstrip(" |").endswith("reversed")


def test_a_report_of_half_the_runs_says_what_is_missing(tmp_path):
    records, text, printed = made(tmp_path, FULL, lambda run: run.cell in PLANNED.main and run.seed <= 3)
    assert "No run of this experiment is finished." in text and "not run" in printed
    assert f"{len(records)} of {len(PLANNED.runs(FULL, CHOSEN))} planned runs" in text
    assert (tmp_path / "figure8.svg").exists() and not (tmp_path / "figure7.svg").exists()


def test_quick_asks_only_what_it_ran(tmp_path):
    _, text, printed = made(tmp_path, QUICK)
    assert "not run |" not in printed and "Sampling more rarely" not in text
    assert (tmp_path / "figure1.svg").exists() and not (tmp_path / "figure8.svg").exists()
    full = made(tmp_path, FULL, lambda run: run.seed <= 3)
    assert full and (tmp_path / "figure8.svg").exists() and (tmp_path / "controls.svg").exists()


def test_the_same_runs_give_the_same_bytes(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        made(tmp_path / name, QUICK)
    for path in sorted((tmp_path / "a").iterdir()):
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes(), path.name


def test_records_are_read_back_as_written(tmp_path):
    records = [record(run) for run in PLANNED.runs(QUICK, CHOSEN)[:4]]
    write_records(tmp_path / "runs.jsonl", records)
    assert list(read_records(tmp_path / "runs.jsonl")) == records


def test_a_record_of_other_settings_stands_for_no_run(tmp_path):
    run = PLANNED.runs(QUICK, CHOSEN)[0]
    write_records(tmp_path / "runs.jsonl", [record(run)])  # its command is not that run's
    with pytest.raises(ConfigError, match="other settings"):
        collect([run], tmp_path, tmp_path / "runs.jsonl")


@pytest.mark.parametrize("longer", [False, True])
def test_tuning_that_is_not_finished_leaves_its_runs_to_go_on_with_elsewhere(
    tmp_path, monkeypatch, capsys, longer
):
    """Each once, also those of a grid that was made ``longer``, which are asked for again."""
    monkeypatch.setitem(TASKS, "adder", tmp_path / "adder" / "plan.yaml")  # without what an earlier one chose
    (tmp_path / "adder").mkdir()
    (tmp_path / "adder" / "plan.yaml").write_text(PLAN.read_text())
    whole = [
        PLANNED.tuning_run(cell, lr, PLANNED.then[cell][1], seed)
        for seed in PLANNED.tuning_seeds
        for lr in PLANNED.lrs
        for cell in PLANNED.main
    ]
    runs = whole if longer else [PLANNED.tuning_run("kto-online", lr, 1.0, 100) for lr in PLANNED.lrs[:2]]
    found = [replace(record(run), command=command(run)) for run in runs]
    known = [replace(one, after=one.after | {PLANNED.metric: i / len(runs)}) for i, one in enumerate(found)]
    write_records(tmp_path / "begun.jsonl", known)
    words = [
        "report",
        "--task",
        "adder",
        "--records",
        str(tmp_path / "begun.jsonl"),
        "--out",
        str(tmp_path / "out"),
    ]
    assert main(words) == 0
    assert f"{len(known)} of its runs are, in" in capsys.readouterr().out
    left = list(read_records(tmp_path / "out" / "adder" / "runs.jsonl"))
    assert sorted(left, key=lambda one: one.name) == sorted(known, key=lambda one: one.name)


def test_a_record_is_read_from_the_runs_own_folder(tmp_path):
    run = next(run for run in PLANNED.runs(QUICK, CHOSEN) if run.cell == "dpo-offline-hl")
    folder = tmp_path / run.name
    folder.mkdir()
    (folder / "config.yaml").write_text("seed: 1\nloss: {name: dpo}\nhumanline: true\n")
    lines = [
        {"step": s, "loss": 0.5, "examples": 8 * (s + 1), "clipped_low": 0.01 * s, "clipped_high": 0.0}
        for s in range(20)
    ]
    lines[10]["eval_accuracy_sampled"] = 0.6
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "summary.json").write_text(
        json.dumps(
            {
                "before": {"eval_accuracy_sampled": 0.5, "eval_loss": None},
                "after": {"eval_accuracy_sampled": 0.7},
                "steps": 20,
                "examples": 160,
                "seconds": 3.0,
            }
        )
    )
    assert collect([run], tmp_path) == [], "not finished until the study has noted what it took"
    (folder / FACTS).write_text(json.dumps({"cpu_seconds": 4.0, "wall_seconds": 5.0}))
    (found,) = collect([run], tmp_path)
    assert (found.before, found.after, found.steps) == (
        {"eval_accuracy_sampled": 0.5},
        {"eval_accuracy_sampled": 0.7},
        20,
    )
    assert found.curve == [(80, 0.6)], "the evaluation before step 10 is of ten steps of 8"
    assert found.clipped == pytest.approx(np.mean([0.01 * s for s in range(20)]))
    assert found.traces["clipped_low"] == pytest.approx(0.185), "of the last tenth, two steps"
    assert "sync_freq=16" in found.command and "seed=1" in found.command
    assert asdict(found)["name"] == "dpo-offline-hl-s1"


def test_a_panel_whose_cells_were_not_run_is_not_drawn(tmp_path):
    made(tmp_path, FULL, lambda run: not run.cell.endswith("-hl-sample"))
    drawn = (tmp_path / "figure5.svg").read_text()
    assert "<!-- parts -->" in drawn and "<!-- clipping or sampling -->" not in drawn
    made(tmp_path, FULL)
    assert "<!-- clipping or sampling -->" in (tmp_path / "figure5.svg").read_text()
