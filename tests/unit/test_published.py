"""What the README says of the study is of its records, docs/study/*/runs.jsonl. The pages of the study are
frozen, with their records."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from statistics import fmean

ROOT = Path(__file__).parents[2]
SAMPLED, GREEDY = "eval_accuracy_sampled", "eval_accuracy_greedy"
LOSSES = ("dpo", "grpo", "kto")


@cache
def records(study, cell):
    """Seed -> the evaluation after the run."""
    lines = map(json.loads, (ROOT / "docs" / "study" / study / "runs.jsonl").read_text().splitlines())
    return {line["seed"]: line["after"] for line in lines if line["cell"] == cell}


def ahead(study, humanline, plain, key=SAMPLED):
    """The mean of the first cell minus that of the second, in points, over the seeds that both have."""
    a, b = records(study, humanline), records(study, plain)
    return fmean(100 * (a[seed][key] - b[seed][key]) for seed in a.keys() & b.keys())


def test_what_the_readme_says_of_scores():
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    dpo = records("evidence", "confirm-tuned-dpo-k1")
    dpo |= records("evidence", "confirm-online-k1")  # two tests share the runs; a run stands in one
    sampled, greedy = (
        {
            loss: ahead("evidence", f"confirm-tuned-{loss}-k1", f"confirm-tuned-{loss}-plain", key)
            for loss in LOSSES
        }
        for key in (SAMPLED, GREEDY)
    )
    assert f"{sampled['dpo']:.1f} points ahead for DPO, {sampled['grpo']:.1f} for GRPO and" in text
    assert f"{-sampled['kto']:.1f} behind for KTO" in text
    assert f"{greedy['dpo']:+.1f}, {greedy['grpo']:+.1f} and −{-greedy['kto']:.1f} by greedy ones" in text
    failed = sum(run[SAMPLED] < 0.78 for run in records("evidence", "confirm-tuned-dpo-plain").values())
    said = f"None of its {len(dpo)} DPO runs ends below 78 points; {failed} plain ones do"
    assert said in text and min(run[SAMPLED] for run in dpo.values()) > 0.82
    gains = [ahead("constraints", f"main-{loss}-offline-hl", f"main-{loss}-offline") for loss in LOSSES]
    assert f"meets all constraints {min(gains):.1f} to {max(gains):.1f} points more often than plain" in text
