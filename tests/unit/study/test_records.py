"""Records: read from a run's own folder, read back as they were written, found again by their settings."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from common.errors import ConfigError
from study.plan import PLANS, read_plan
from study.records import FACTS, append_record, collect, command, finished, read_record, read_records

RUN = next(run for _, run in read_plan(PLANS["paper"]).runs() if run.cell == "main-sums-dpo-offline-hl")


def test_a_record_is_read_from_the_run_s_own_folder_and_read_back_as_written(tmp_path):
    folder = tmp_path / RUN.name
    folder.mkdir()
    (folder / "config.yaml").write_text("seed: 1\nloss: {name: dpo}\nhumanline: true\n")
    lines = [
        {"step": s, "loss": 0.5, "examples": 8 * (s + 1), "clipped_low": 0.01 * s, "clipped_high": 0.0}
        for s in range(20)
    ]
    lines[10]["eval_accuracy_sampled"] = 0.6
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    summary = {
        "before": {"eval_accuracy_sampled": 0.5, "eval_loss": None},
        "after": {"eval_accuracy_sampled": 0.7},
        "steps": 20,
        "examples": 160,
        "seconds": 3.0,
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    assert not finished(folder), "not finished until the study has noted what it took"
    (folder / FACTS).write_text(json.dumps({"cpu_seconds": 4.0, "wall_seconds": 5.0}))
    found = read_record(RUN, folder)
    assert found.before == {"eval_accuracy_sampled": 0.5} and found.after == {"eval_accuracy_sampled": 0.7}
    assert found.steps == 20 and found.curve == [(80, 0.6)], "before step 10 there are ten steps of 8"
    assert found.clipped == pytest.approx(np.mean([0.01 * s for s in range(20)]))
    assert found.traces["clipped_low"] == pytest.approx(0.185), "of the last tenth, two steps"
    assert found.command == command(RUN) and "sync_freq=16" in found.command and "seed=1" in found.command
    other = replace(found, name="earlier-s1", cell="earlier", command=found.command[::-1])
    append_record(tmp_path / "runs.jsonl", other)
    assert list(read_records(tmp_path / "runs.jsonl")) == [other]
    assert collect([RUN], tmp_path / "none", tmp_path / "runs.jsonl") == [
        replace(found, command=other.command)
    ]


def test_a_record_of_this_name_with_other_settings_is_refused(tmp_path):
    folder = tmp_path / "runs.jsonl"
    record = next(read_records(PLANS["paper"].parents[1] / "docs" / "study" / "evidence" / "runs.jsonl"))
    append_record(folder, replace(record, name=RUN.name))
    with pytest.raises(ConfigError, match="other settings"):
        collect([RUN], tmp_path, folder)
