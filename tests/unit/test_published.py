"""What the README and docs/real-model.md say of the study is of its records. The study's own pages are
frozen, with their records."""

from __future__ import annotations

import gzip
import itertools
import json
from functools import cache
from pathlib import Path
from statistics import fmean, stdev

from scipy import stats

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


ARMS = {"plain": "offline", "humanline": "offline + humanline", "online": "online"}
KINDS = ("sampled", "greedy")


@cache
def claim():
    """(Arm, loss, kind of answer) -> seed -> the mean reward, of 100, of the answers after the run."""
    found = {}
    for folder in (ROOT / "docs" / "study" / "claim" / "records").glob("claim-*"):
        _, arm, loss, seed = folder.name.split("-")
        with gzip.open(folder / "answers.jsonl.gz", "rt", encoding="utf-8") as file:
            answers = [json.loads(line) for line in file]
        last = max(answer["step"] for answer in answers)
        for kind in KINDS:
            rewards = [one["verdict"] for one in answers if (one["step"], one["kind"]) == (last, kind)]
            found.setdefault((arm, loss, kind), {})[seed] = 100 * fmean(rewards)
    return found


def standard_error(values):
    return stdev(values) / len(values) ** 0.5


def claimed(second, first, kind):
    """The mean difference with its 95 % interval, of the mean of the two losses, paired by seed, as text."""
    apart = [
        fmean(claim()[second, loss, kind][seed] - claim()[first, loss, kind][seed] for loss in ("dpo", "kto"))
        for seed in claim()[first, "dpo", kind]
    ]
    middle, half = fmean(apart), stats.t.isf(0.025, len(apart) - 1) * standard_error(apart)
    return f"{middle:+.1f} [{middle - half:.1f}, {middle + half:.1f}]".replace("-", "−")


def test_what_is_said_of_the_claim():
    page = (ROOT / "docs" / "real-model.md").read_text(encoding="utf-8")
    for arm, loss in itertools.product(ARMS, ("dpo", "kto")):
        cells = [list(claim()[arm, loss, kind].values()) for kind in KINDS]
        shown = " | ".join(f"{fmean(values):.1f} ± {standard_error(values):.1f}" for values in cells)
        assert f"| {loss.upper()} {ARMS[arm]} | {shown} |" in page
    for second, first in (("humanline", "plain"), ("online", "plain"), ("humanline", "online")):
        sampled, greedy = (claimed(second, first, kind) for kind in KINDS)
        assert f"| {ARMS[second]} − {ARMS[first]} | {sampled} | {greedy} |" in page
    helps = claimed("humanline", "plain", "sampled")
    online, interval = claimed("online", "plain", "sampled").lstrip("+").split(" ", 1)
    said = f"{helps.replace(' ', ' points of 100 ', 1)}; online training is {online} ahead of plain offline"
    assert f"{said} training {interval} |" in (ROOT / "README.md").read_text(encoding="utf-8")
