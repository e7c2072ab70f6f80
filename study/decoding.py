"""The tests of a plan beside what the same runs say by greedy answers, as markdown for the plan's page.

    python -m study.decoding evidence
    python -m study.decoding constraints

Everything comes from the published records. A run is far from the start by the study's own rule: answers that
are ten tokens longer, or more than 1 nat a token.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median, stdev

from scipy import stats

from launch.results import markdown
from reports.outcome import drifted
from reports.statistics import SeedMean, holm, mean
from study.markdown import Table
from study.page import Decision, decide, p_of
from study.plan import PLANS, PUBLISHED, Plan, known, read_plan
from study.records import GREEDY, SAMPLED, Record, read_records

LENGTH = "eval_length_sampled"
DECODINGS = {"sampled": SAMPLED, "greedy": GREEDY}
FAILED = 78.0
"""Points on stories below which a tuned run of plain DPO was called failed, after the runs were seen."""
LOSSES, OFFLINE = ("dpo", "grpo", "kto"), ("offline", "offline-hl")
VARIANTS = (*OFFLINE, "online", "online-hl")

Cells = Mapping[str, Mapping[int, Record]]
"""Cell -> seed -> record."""


def cells_of(name: str, plan: Plan) -> Cells:
    cells: dict[str, dict[int, Record]] = {}
    for record in known(plan, Path("no-runs"), PUBLISHED[name]).values():
        cells.setdefault(record.cell, {})[record.seed] = record
    return cells


def points(runs: Mapping[int, Record], key: str) -> dict[int, float]:
    """Return seed -> points of 100."""
    return {seed: 100 * run.after[key] for seed, run in runs.items()}


def apart(cells: Cells, names: Sequence[str], key: str) -> list[float]:
    """Return the second of two cells minus the first, in points, of each seed that both have."""
    a, b = (points(cells[name], key) for name in names)
    return [b[seed] - a[seed] for seed in sorted(a.keys() & b.keys())]


def effect_of(differences: Sequence[float]) -> SeedMean:
    effect = mean(differences)
    assert effect is not None
    return effect


def far(runs: Mapping[int, Record]) -> int:
    return sum(bool(drifted({"before": run.before, "after": run.after})) for run in runs.values())


def interval(effect: SeedMean) -> str:
    low, high = effect.interval
    return f"{effect.value:+.1f} [{low:+.1f}, {high:+.1f}]"


def larger(effect: SeedMean, smallest: float) -> str:
    """Return whether the effect is larger than the smallest interesting one: the whole interval is outside of
    ±``smallest`` (yes), inside of it (no), or reaches over its edge (open)."""
    low, high = effect.interval
    if low > smallest or high < -smallest:
        return "yes"
    return "no" if -smallest < low and high < smallest else "open"


def tests_table(decisions: Sequence[Decision]) -> Table:
    rows = [["test", "claim", "held equal", "n", "effect [95 %]", "p, Holm", "decided", "smallest", "larger"]]
    for d in decisions:
        assert d.effect is not None and d.p_holm is not None
        rows.append(
            [
                d.block.sweep.name,
                d.test.claim,
                d.test.held,
                str(d.n),
                interval(d.effect),
                f"{d.p_holm:.2g}",
                d.word,
                f"{d.test.effect:g}",
                larger(d.effect, d.test.effect),
            ]
        )
    return rows


def decodings_table(plan: Plan, cells: Cells) -> Table:
    """Two rows a test: by sampled answers, which were planned, and by greedy ones; p by Holm within each."""
    names = {b.sweep.name: [f"{b.sweep.name}-{cell}" for cell in b.sweep.cells] for b in plan.tests}
    by_decoding = {
        said: holm([p_of(b.test, apart(cells, names[b.sweep.name], key)) for b in plan.tests if b.test])
        for said, key in DECODINGS.items()
    }
    rows = [
        [
            "test",
            "difference",
            "answers",
            "mean [95 %]",
            "median",
            "seeds ahead",
            "p, Holm",
            "far from the start",
        ]
    ]
    for at, block in enumerate(plan.tests):
        first, second = names[block.sweep.name]
        asked = " − ".join(reversed(list(block.sweep.cells)))
        lost = f"{far(cells[second])} and {far(cells[first])} of {len(cells[first])}"
        for said, key in DECODINGS.items():
            found = apart(cells, (first, second), key)
            ahead = f"{sum(d > 0 for d in found)} of {len(found)}"
            begin = [block.sweep.name, asked] if said == "sampled" else ["", ""]
            p = f"{by_decoding[said][at]:.2g}"
            numbers = [interval(effect_of(found)), f"{median(found):+.1f}", ahead, p]
            rows.append([*begin, said, *numbers, lost if said == "sampled" else ""])
    return rows


def tuned_dpo(cells: Cells) -> str:
    """Return what the failed runs of the last test carry."""
    plain, humanline = (points(cells[f"confirm-tuned-dpo-{cell}"], SAMPLED) for cell in ("plain", "k1"))
    failed = [seed for seed, score in plain.items() if score < FAILED]
    every = {seed: humanline[seed] - plain[seed] for seed in plain}
    rest = effect_of([d for seed, d in every.items() if seed not in failed])
    carried = sum(every[seed] for seed in failed) / len(every)
    ahead = sum(d > 0 for d in every.values())
    return (
        f"confirm-tuned-dpo: {len(failed)} of {len(plain)} plain runs end below {FAILED:g} and carry "
        f"{carried:.2f} of {fmean(every.values()):.2f} points; without them {interval(rest)}. Humanline: "
        f"{sum(score < FAILED for score in humanline.values())} below {FAILED:g}. Ahead in {ahead}, "
        f"sign test p = {stats.binomtest(ahead, len(every)).pvalue:.2f}."
    )


def online(cells: Cells) -> str:
    """Return online minus offline by the tests' fresh seeds, beside the ten seeds of the earlier plan."""
    fresh = points(cells["confirm-online-online"], SAMPLED)
    gap = effect_of(apart(cells, ("confirm-tuned-dpo-plain", "confirm-online-online"), SAMPLED))
    files = PUBLISHED["paper"]
    ten = {
        r.seed: r
        for file in files
        for r in read_records(file)
        if r.cell == "dpo-online" and "model=instruct" in r.command
    }
    old = list(points(ten, SAMPLED).values())
    new = list(fresh.values())
    p = stats.ttest_ind(old, new, equal_var=False).pvalue
    return (
        f"Tuned online DPO, stories: {fmean(new):.1f} (SD {stdev(new):.1f}, {len(new)} fresh seeds), "
        f"{far(cells['confirm-online-online'])} far from the start; {fmean(old):.1f} (SD {stdev(old):.1f}, "
        f"{len(old)} seeds of study/paper.yaml), {far(ten)} far; Welch p = {p:.2g}. Online − offline by the "
        f"fresh seeds: {interval(gap)} (n = {gap.n})."
    )


def variants_table(cells: Cells) -> Table:
    """The variants of each loss against one another, by both decodings."""
    rows = [["loss", "difference", "sampled", "greedy"]]
    for loss in LOSSES:
        for first, second in (("offline", "offline-hl"), ("offline", "online"), ("offline-hl", "online")):
            found = [
                effect_of(apart(cells, (f"main-{loss}-{first}", f"main-{loss}-{second}"), k))
                for k in DECODINGS.values()
            ]
            rows.append([loss.upper(), f"{second} − {first}", *map(interval, found)])
    return rows


def real_model(cells: Cells) -> str:
    """Return length and score within the offline cells, what tuning by one seed overstates, runs far from the
    start, and humanline minus plain over the three losses (a mean per seed)."""
    lengths: list[float] = []
    scores: list[float] = []
    gaps, lost = [], []
    for loss in LOSSES:
        for variant in VARIANTS:
            runs = cells[f"main-{loss}-{variant}"]
            score = {seed: 100 * run.after[SAMPLED] for seed, run in runs.items()}
            if variant in OFFLINE:
                tokens = {seed: run.after[LENGTH] for seed, run in runs.items()}
                lengths += [value - fmean(tokens.values()) for value in tokens.values()]
                scores += [value - fmean(score.values()) for value in score.values()]
            tried = [
                100 * run.after[SAMPLED]
                for name, found in cells.items()
                if name.startswith(f"tune-{loss}-{variant}-lr")
                for run in found.values()
            ]
            gaps.append(max(tried) - fmean(score.values()))
            lost += [f"{loss} {variant} {far(runs)}"] if far(runs) else []
    fit = stats.linregress(lengths, scores)
    offline = [apart(cells, [f"main-{loss}-{x}" for x in OFFLINE], SAMPLED) for loss in LOSSES]
    pooled = effect_of([fmean(differences) for differences in zip(*offline, strict=True)])
    pilots = ", ".join(f"{cell} {far(runs)}" for cell, runs in cells.items() if cell.startswith("pilot"))
    return (
        f"Within the offline cells score and length: {fit.slope:+.2f} points a token, r = {fit.rvalue:.2f}, "
        f"{len(lengths)} runs. Best of eight in tuning minus the test's mean: {fmean(gaps):.1f} points over "
        f"twelve cells ({min(gaps):.1f} to {max(gaps):.1f}). Far from the start, of five: {', '.join(lost)}; "
        f"of the pilot's three: {pilots}. "
        f"Humanline − plain, mean of the three losses per seed: {interval(pooled)} (after the fact)."
    )


def main(name: str) -> str:
    """Return the page's part of the plan ``name``."""
    plan = read_plan(PLANS[name])
    cells = cells_of(name, plan)
    values = {cell: points(runs, SAMPLED) for cell, runs in cells.items()}
    said = [markdown(tests_table(decide(plan, values))), markdown(decodings_table(plan, cells))]
    if name == "evidence":
        said += [tuned_dpo(cells), online(cells)]
    if name == "constraints":
        said += [markdown(variants_table(cells)), real_model(cells)]
    return "\n\n".join(said)


if __name__ == "__main__":
    print(main(sys.argv[1]))
