"""The study's numbers on the pages are those of its records, docs/study/*/runs.jsonl. The pages are frozen:
they are written by hand, and this says what of them has to hold."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from statistics import fmean, median

import pytest

from reports.outcome import drifted
from reports.statistics import SeedMean, mean

ROOT = Path(__file__).parents[2]
RECORDS = ROOT / "docs" / "study"
SAMPLED, GREEDY = "eval_accuracy_sampled", "eval_accuracy_greedy"
LOSSES, VARIANTS = ("dpo", "grpo", "kto"), ("offline", "offline-hl", "online", "online-hl")
TUNED, ONLINE = "confirm-tuned-dpo", "confirm-online"
HUMANLINE = (f"{TUNED}-k1", f"{ONLINE}-k1")
"""Two tests share the runs of this cell; a run stands under one of them."""
ROWS = [  # of docs/study.md: how a row begins, the cells that are subtracted, the smallest interesting effect
    ("hl − plain DPO, rate 9e-5", ["confirm-low-rate-k1"], ["confirm-low-rate-plain"], 1.5),
    ("the same, rate 3e-4", ["confirm-high-rate-k1"], ["confirm-high-rate-plain"], 5),
    ("hl − plain DPO almost without", ["confirm-no-anchor-k1"], ["confirm-no-anchor-plain"], 1.5),
    ("each tuned, DPO", HUMANLINE, [f"{TUNED}-plain"], 2),
    ("each tuned, KTO", ["confirm-tuned-kto-k1"], ["confirm-tuned-kto-plain"], 1.5),
    ("each tuned, GRPO", ["confirm-tuned-grpo-k1"], ["confirm-tuned-grpo-plain"], 1.5),
    ("online − hl, DPO", [f"{ONLINE}-online"], HUMANLINE, 1.5),
    ("sums: hl (k = 16)", ["confirm-sums-k16"], ["confirm-sums-plain"], 5),
    ("sums, KTO: hl, k = 16", ["confirm-rare-sync-k16"], ["confirm-rare-sync-k1"], 5),
]


@cache
def records(name):
    """Cell -> seed -> record."""
    found: dict = {}
    for line in (RECORDS / name / "runs.jsonl").read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        found.setdefault(record["cell"], {})[record["seed"]] = record
    return found


def page(name):
    return (ROOT / name).read_text(encoding="utf-8")


def runs(name, cells):
    return {seed: run for cell in cells for seed, run in records(name).get(cell, {}).items()}


def apart(name, second, first, key=SAMPLED):
    """The cells ``second`` minus the cells ``first``, in points, by seed."""
    a, b = runs(name, first), runs(name, second)
    return [100 * (b[seed]["after"][key] - a[seed]["after"][key]) for seed in sorted(a.keys() & b.keys())]


def shown(effect: SeedMean, signed=False):
    low, high = effect.interval
    sign = "+" if signed and effect.value > 0 else ""
    return f"{sign}{effect.value:.1f} [{low:.1f}, {high:.1f}]".replace("-", "−").replace("−0.0", "0.0")


def larger(effect: SeedMean, smallest):
    low, high = effect.interval
    if low > smallest or high < -smallest:
        return "yes"
    return "no" if -smallest < low and high < smallest else "open"


@pytest.mark.parametrize(("begins", "second", "first", "smallest"), ROWS, ids=[row[0] for row in ROWS])
def test_the_study_s_table_is_of_its_records(begins, second, first, smallest):
    (row,) = (line for line in page("docs/study.md").splitlines() if line.startswith(f"| {begins}"))
    sampled = apart("evidence", second, first)
    effect, ahead = mean(sampled), sum(d > 0 for d in sampled)
    cells = [
        shown(effect, signed=True),
        f"{smallest:g}: {larger(effect, smallest)}",
        f"{median(sampled):+.1f}; {ahead}".replace("-", "−"),
        shown(mean(apart("evidence", second, first, GREEDY)), signed=True),
    ]
    assert f"; {len(sampled)} | {' | '.join(cells)} |" in row
    every = [*runs("evidence", second).values(), *runs("evidence", first).values()]
    far = sum(bool(drifted(run)) for run in every)
    assert row.endswith(f" {far} |" if far and begins != "each tuned, DPO" else " 14 |" if far else " – |")


def test_what_study_and_readme_say_of_failed_runs_is_of_the_records():
    text, readme = page("docs/study.md"), " ".join(page("README.md").split())
    plain, humanline = runs("evidence", [f"{TUNED}-plain"]), runs("evidence", HUMANLINE)
    failed = [seed for seed, run in plain.items() if run["after"][SAMPLED] < 0.78]
    length = "eval_length_sampled"
    grew = sorted(plain[seed]["after"][length] - plain[seed]["before"][length] for seed in failed)
    carried = sum(humanline[seed]["after"][SAMPLED] - plain[seed]["after"][SAMPLED] for seed in failed)
    assert f"{len(failed)} of its {len(plain)} runs end below 78" in text and len(failed) == 12
    assert f"carry {100 * carried / len(plain):.2f} of the" in text
    assert sum(g >= 10 for g in grew) == 10 and f"by {grew[0]:.1f} and {grew[1]:.1f}" in text
    assert min(run["after"][SAMPLED] for run in humanline.values()) > 0.82
    said = f"None of its {len(humanline)} DPO runs ends below 78 points; {len(failed)} plain ones do"
    assert said in readme
    online = mean(apart("evidence", [f"{ONLINE}-online"], [f"{TUNED}-plain"]))
    assert online.n == 22 and f"{shown(online)} by these fresh seeds" in text


def named(loss, cell):
    return f"{loss.upper()} {cell.replace('-hl', ' + humanline')}" if cell else loss


def test_what_the_docs_say_of_the_real_model_s_table_are_its_records():
    docs = page("docs/study/constraints/table.md")
    for loss in LOSSES:
        for cell in VARIANTS:
            every = runs("constraints", [f"main-{loss}-{cell}"]).values()
            score = mean([100 * run["after"][SAMPLED] for run in every])
            row = rf"\| {re.escape(named(loss, cell))} \|.*\| {re.escape(shown(score))} \|"
            assert score.n == 5 and re.search(row, docs), (loss, cell)
        for second, first in (("offline-hl", "offline"), ("online", "offline"), ("online", "offline-hl")):
            effect = mean(apart("constraints", [f"main-{loss}-{second}"], [f"main-{loss}-{first}"]))
            assert shown(effect, signed=True) in docs, (loss, second, first)


def test_what_the_docs_say_of_one_seed_are_its_evaluations():
    docs = page("docs/study/constraints/table.md")
    rows = [json.loads(line) for line in page("docs/study/constraints/seed-1001.jsonl").splitlines()]
    assert [row["cell"] for row in rows] == ["before", *(f"{a}-{b}" for a in LOSSES for b in VARIANTS)]
    for row in rows:
        loss, _, cell = row["cell"].partition("-")
        said = row["ifeval"]
        rates = [said[f"{level}_{how}"] for level in ("prompt", "instruction") for how in ("strict", "loose")]
        assert said["mean"] == pytest.approx(fmean(rates), abs=1e-6)
        figure = f"{100 * said['mean']:.1f}"
        if cell:
            change, low, high = (100 * value for value in said["from_before"])
            figure += f" ({change:+.1f} [{low:.1f}, {high:.1f}])"
            assert change == pytest.approx(100 * (said["mean"] - rows[0]["ifeval"]["mean"]), abs=1e-3)
        fluent = f"{row['fluency']:.2f} | {row['reward']:.2f} | {100 * row['meets_all_fluently']:.1f}"
        wanted = f"| {named(loss, cell)} | {100 * row['meets_all']:.1f} | {fluent} | {figure} |"
        assert wanted.replace("-", "−") in docs, (loss, cell)
    rewards = {row["cell"]: row["reward"] for row in rows}
    for loss in LOSSES:
        last = min(VARIANTS, key=lambda cell: rewards[f"{loss}-{cell}"])
        assert last == "offline-hl", "last of four, as is said"


def test_what_the_readme_says_is_of_the_records():
    """Of scores, and of costs on GPUs."""
    text = " ".join(page("README.md").split())
    tuned = {loss: [f"confirm-tuned-{loss}-k1"] for loss in LOSSES} | {"dpo": HUMANLINE}

    def ahead(key):
        plain = {loss: [f"confirm-tuned-{loss}-plain"] for loss in LOSSES}
        return {loss: mean(apart("evidence", tuned[loss], plain[loss], key)).value for loss in LOSSES}

    sampled, greedy = ahead(SAMPLED), ahead(GREEDY)
    assert f"{sampled['dpo']:.1f} points ahead for DPO, {sampled['grpo']:.1f} for GRPO and" in text
    assert f"{-sampled['kto']:.1f} behind for KTO" in text
    assert f"{greedy['dpo']:+.1f}, {greedy['grpo']:+.1f} and −{-greedy['kto']:.1f} by greedy ones" in text
    assert round(-mean(apart("evidence", ["confirm-sums-k16"], ["confirm-sums-plain"])).value) == 12
    pairs = ((f"main-{loss}-offline-hl", f"main-{loss}-offline") for loss in LOSSES)
    gains = [mean(apart("constraints", [one], [other])).value for one, other in pairs]
    assert f"meets all constraints {min(gains):.1f} to {max(gains):.1f} points more often than plain" in text
    ratios = []
    for name in ("h100", "h200"):
        checks = json.loads(page(f"docs/gpus/{name}.json"))["checks"]
        parts = ((check["name"], check["text"].partition(" tokens/s")) for check in checks)
        rates = {step: float(rate.replace(",", "")) for step, (rate, unit, _) in parts if unit}
        hl = {step: rates[f"{step} humanline"] for step in rates if f"{step} humanline" in rates}
        ratios += [rates[step] / rate for step, rate in hl.items()]
    assert len(ratios) == 7 and f"{min(ratios):.2f} to {max(ratios):.2f} of a plain one" in text
