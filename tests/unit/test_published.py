"""What the README says of the study is of its records, docs/study/*/runs.jsonl. The pages of the study are
frozen, with their records."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from reports.statistics import SeedMean, mean

ROOT = Path(__file__).parents[2]
SAMPLED, GREEDY = "eval_accuracy_sampled", "eval_accuracy_greedy"
LOSSES = ("dpo", "grpo", "kto")
HUMANLINE = ("confirm-tuned-dpo-k1", "confirm-online-k1")
"""Two tests share the runs of this cell; a run stands under one of them."""


@cache
def records(name):
    """Cell -> seed -> record."""
    found: dict = {}
    for line in page(f"docs/study/{name}/runs.jsonl").splitlines():
        record = json.loads(line)
        found.setdefault(record["cell"], {})[record["seed"]] = record
    return found


def page(name):
    return (ROOT / name).read_text(encoding="utf-8")


def runs(name, cells):
    return {seed: run for cell in cells for seed, run in records(name).get(cell, {}).items()}


def apart(name, second, first, key=SAMPLED) -> SeedMean:
    """The cells ``second`` minus the cells ``first``, in points, over seeds."""
    a, b = runs(name, first), runs(name, second)
    return mean(
        [100 * (b[seed]["after"][key] - a[seed]["after"][key]) for seed in sorted(a.keys() & b.keys())]
    )


def test_what_the_readme_says_of_scores():
    text = " ".join(page("README.md").split())
    tuned = {loss: [f"confirm-tuned-{loss}-k1"] for loss in LOSSES} | {"dpo": HUMANLINE}

    def ahead(key):
        plain = {loss: [f"confirm-tuned-{loss}-plain"] for loss in LOSSES}
        return {loss: apart("evidence", tuned[loss], plain[loss], key).value for loss in LOSSES}

    sampled, greedy = ahead(SAMPLED), ahead(GREEDY)
    assert f"{sampled['dpo']:.1f} points ahead for DPO, {sampled['grpo']:.1f} for GRPO and" in text
    assert f"{-sampled['kto']:.1f} behind for KTO" in text
    assert f"{greedy['dpo']:+.1f}, {greedy['grpo']:+.1f} and −{-greedy['kto']:.1f} by greedy ones" in text
    plain, humanline = runs("evidence", ["confirm-tuned-dpo-plain"]), runs("evidence", HUMANLINE)
    failed = sum(run["after"][SAMPLED] < 0.78 for run in plain.values())
    said = f"None of its {len(humanline)} DPO runs ends below 78 points; {failed} plain ones do"
    assert said in text and min(run["after"][SAMPLED] for run in humanline.values()) > 0.82
    pairs = ((f"main-{loss}-offline-hl", f"main-{loss}-offline") for loss in LOSSES)
    gains = [apart("constraints", [one], [other]).value for one, other in pairs]
    assert f"meets all constraints {min(gains):.1f} to {max(gains):.1f} points more often than plain" in text
