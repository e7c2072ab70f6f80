"""A plan's page, made of the records that there are: limits, the confirmatory tests, then what is exploratory
with a figure for each question.

The files are ``<out>/report.md`` and its figures. An unfinished test shows its progress and no number.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import numpy as np
from matplotlib.figure import Figure
from scipy import stats

from common.files import write_whole
from launch.frontier import KL, LENGTH
from reports.outcome import drifted
from reports.statistics import SIGNIFICANT, SeedMean, holm, mean, paired, paired_power
from study.figures import effects_figure, lag_figure, surface_figure, svg, variants_figure
from study.markdown import Section, Table, as_markdown, shown
from study.plan import DIFFERENT, MAIN, SAME, Block, Plan, Test, Values, told
from study.records import GREEDY, SAMPLED, Record
from study.surface import frontier, law, near_table, surface_table

HEADINGS = {
    "paper": "The paper's comparisons in miniature",
    "evidence": "Is humanline more than a larger rate with a weaker anchor?",
    "constraints": "Does humanline help a real model on short answers under constraints?",
}
CAPTIONS = {
    "main": "Mean, 95 % interval and every seed of each cell.",
    "surface": "Score against the KL from the start, nats a token: every run, and each arm's frontier.",
    "factors": "Humanline minus plain in points, with 95 % intervals over seeds.",
    "anchors": "Each minus fixed anchors in points, with 95 % intervals over seeds.",
    "lag": "Score against the mean lag d of the reference, by schedule; dotted: a reference that stays.",
}
EMBEDDED = (
    "**Limits.** One model of 0.6 million parameters, one initial model and one data set a task; 80 steps; "
    "no GPU. Seeds change the order of the data, which half of it is trained on and what is sampled, so "
    "intervals cover seeds alone and understate what another model or data set would give. Points are of "
    "100: sampled accuracy on sums, true reward on stories. At k = 1 the three losses are one experiment on "
    "stories."
)
LIMITS = {
    "constraints": (
        "**Limits.** One model of 135 million parameters, whose weights went through 4 bits; one task; 16 "
        "steps on its own answers. Seeds change the order of the data, which of them are trained on and what "
        "is sampled, so intervals cover seeds alone. Points are of 100: the share of sampled answers that "
        "meet all constraints, fluent or not. The tests' runs are those of the cells, which are shown as "
        "they come; their number was fixed before the first."
    )
}
"""Plan -> its page's first lines; of another plan they are the embedded tasks'."""
FRESH = (
    " Settings of the tests come from earlier runs of the same tasks; their seeds and prompts are new, "
    "the tasks are not."
)


@dataclass(frozen=True)
class Decision:
    """``effect``: the second cell minus the first, in points; None until all seeds are there. ``p_holm``: of
    ``p_of``, corrected over all tests, unfinished ones counting as 1."""

    block: Block
    test: Test
    n: int
    effect: SeedMean | None = None
    p_holm: float | None = None
    word: str = "not decided: not run to its end"


def decide(plan: Plan, values: Values) -> list[Decision]:
    """Return the decision of each test. ``values``: cell -> seed -> points."""
    comparisons = []
    for block in plan.tests:
        assert block.test is not None
        a, b = (values.get(f"{block.sweep.name}-{cell}", {}) for cell in block.sweep.cells)
        apart = [b[seed] - a[seed] for seed in sorted(a.keys() & b.keys())]
        whole = len(apart) == len(block.sweep.seeds)
        comparisons.append((block, block.test, apart, p_of(block.test, apart) if whole else None))
    corrected = holm([1.0 if p is None else p for *_, p in comparisons])
    decisions = [Decision(block, test, len(apart)) for block, test, apart, _ in comparisons]
    return [
        decision
        if p is None or held is None
        else replace(decision, effect=mean(apart), p_holm=held, word=word_of(test, apart, held, plan.level))
        for decision, (_, test, apart, p), held in zip(decisions, comparisons, corrected, strict=True)
    ]


def p_of(test: Test, apart: Sequence[float]) -> float:
    """Return the p-value of a paired t-test, or for ``same`` of two one-sided ones against ±effect."""
    if test.kind == DIFFERENT:
        p = paired("", "", apart).p_t
        return 0.0 if p is None else p  # all differences are equal, and not 0
    if len(set(apart)) == 1:
        return float(abs(apart[0]) >= test.effect)
    sides = ((-test.effect, "greater"), (test.effect, "less"))
    return max(float(stats.ttest_1samp(apart, bound, alternative=side).pvalue) for bound, side in sides)


def word_of(test: Test, apart: Sequence[float], p_holm: float, level: float) -> str:
    """Return the decision in words. What the corrected test leaves open may still be decided by the interval
    at 1 - ``level``, which holds for all tests together: within ±effect, or outside it."""
    middle = fmean(apart)
    half = float(stats.t.isf(level / 2, len(apart) - 1)) * (np.std(apart, ddof=1) / math.sqrt(len(apart)))
    if p_holm < SIGNIFICANT and test.kind == SAME:
        return f"**decided: the same** within ±{test.effect:g}"
    if p_holm < SIGNIFICANT:
        return f"**decided: {'higher' if middle > 0 else 'lower'}**"
    if test.kind == DIFFERENT and abs(middle) + half < test.effect:
        return f"**decided: the same** within ±{test.effect:g}"
    if test.kind == SAME and abs(middle) - half > test.effect:
        return f"**decided: {'higher' if middle > 0 else 'lower'}** by more than {test.effect:g}"
    return "not decided"


def planned_power(test: Test, n: int, level: float) -> float:
    """Return the power of ``n`` seeds at significance ``level``: for a difference of ``test.effect``, or for
    ``same`` where there is none."""
    if test.kind == DIFFERENT:
        return paired_power(test.effect, test.deviation, n, level)
    reach = test.effect / test.deviation * math.sqrt(n) - stats.t.isf(level, n - 1)
    return max(0.0, float(2 * stats.t.cdf(reach, n - 1) - 1))


def write_page(name: str, file: Path, plan: Plan, records: Mapping[str, Record], out: Path) -> str:
    """Write the page of what ``python -m study name`` runs, and its figures; return the text to print.
    ``file``: the plan's."""
    out.mkdir(parents=True, exist_ok=True)
    values: dict[str, dict[int, float]] = {}
    for record in records.values():
        if SAMPLED in record.after:
            values.setdefault(record.cell, {})[record.seed] = 100 * record.after[SAMPLED]
    limits = LIMITS.get(file.stem, EMBEDDED) + (FRESH if plan.tests else "")
    sections = [Section("", (limits, state(name, file, plan, records)))]
    figures: dict[str, Figure | None] = {}
    if plan.tests:
        decisions = decide(plan, values)
        sections += [
            Section("The tests", (TESTS.format(len(plan.tests)),), tests_table(name, decisions)),
            Section(
                "How the tests were planned", (PLANNED.format(plan.level),), planned_table(plan, decisions)
            ),
        ]
    if plan.of_kind("surface"):
        arms = {b.sweep.name: (b, f) for b in plan.blocks if (f := frontier(b, records)) is not None}
        figures["surface"] = surface_figure(arms)
        sections += [
            Section(
                "Rate, anchor, distance (exploratory)", (SURFACE,), surface_table(arms), pictured("surface")
            ),
            Section("At one rate and anchor, by distance (exploratory)", (NEAR,), near_table(plan, records)),
            Section("", (law(plan, records),)),
        ]
    for kind in dict.fromkeys(b.kind for b in plan.blocks if b.test is None and b.kind != "surface"):
        blocks = plan.of_kind(kind)
        effects = effects_of(plan, blocks, values)
        figures[kind] = figure_of(kind, blocks, values, effects)
        title, text = EXPLORED.get(kind, (kind.capitalize(), UNTUNED))
        sections.append(Section(f"{title} (exploratory)", (text,), effects_table(effects), pictured(kind)))
        if kind == MAIN:
            sections.append(Section("Length and distance", (BESIDE,), beside_table(blocks, records)))
    drawn = {stem: figure for stem, figure in figures.items() if figure is not None}
    for stem, figure in drawn.items():
        (out / f"{stem}.svg").write_bytes(svg(figure))
    there = [s if s.figure is None or s.figure[0] in drawn else replace(s, figure=None) for s in sections]
    write_whole(out / "report.md", as_markdown(HEADINGS.get(file.stem, file.stem), there))
    return f"The page: {out}/report.md"


def pictured(stem: str) -> tuple[str, str] | None:
    return (stem, CAPTIONS[stem]) if stem in CAPTIONS else None


TESTS = (
    "{} tests in one family; everything else on this page is exploratory. The effect is the "
    "second minus the first of the two runs that are compared, in points, paired by seed, with its 95 % "
    "interval. *Decided* is by Holm over all tests (a paired t-test, or two one-sided ones for *the same*), "
    "or by an interval that holds for all together. A test whose seeds are not all there shows no number, so "
    "that nobody looks before the end."
)
PLANNED = (
    "Power of the planned seeds at Holm's first threshold, {:.4f}: for the smallest interesting effect, "
    "given the SD that was measured before (the upper end of its one-sided 80 % interval); for *the same*, "
    "if there is none."
)
SURFACE = (
    "Each arm minus plain at equal numbers of tried settings, three ways: at the one setting that is best "
    "for all arms, each at its own best, and at equal KL from the start (means over the frontiers where both "
    "reach). Settings were chosen by these numbers, and seeds count whose whole surface is there. `edge`: "
    "the axis on whose edge an arm's best setting lies."
)
NEAR = (
    "Humanline minus plain, offline, in runs of one loss, seed, rate and anchor, by how much further from "
    "the start humanline ended."
)
EXPLORED = {
    MAIN: ("The variants of each loss", "Each minus plain offline training. Every cell is tuned for itself."),
    "tune": ("Tuning", "Each minus `offline` at the same rate and anchor, on validation prompts."),
    "pilot": (
        "Spread before the tests",
        "Each minus `offline`, each tuned, on validation prompts: what the tests' seeds were planned with.",
    ),
    "k": (
        "How often to sync",
        "Each minus `offline-hl`, whose k is 16 on sums and 1 on stories. k = 1, 4 and 16 are tuned for "
        "themselves.",
    ),
    "factors": (
        "What turns the sign on sums",
        "DPO on sums at one rate and anchor: each arm minus plain on the same pairs. `three` is to be read "
        "against `one`, the others against `none`.",
    ),
    "lag": ("Lag or jump", "Each schedule minus d = 1, where the three schedules are one."),
    "anchors": (
        "Which anchor",
        "GRPO with a KL penalty of two weights: neither anchor moves (`fixed`), both move (`both`), or the "
        "ratio's alone (`ratio`). A moving KL anchor with a fixed ratio was not run: no setting has it.",
    ),
}
"""Kind of blocks -> heading and text."""
BESIDE = (
    "What stands beside each score: greedy answers, tokens of an answer, KL from the start in nats a token, "
    "and CPU seconds of a run with its evaluations; means over seeds. `start`: the initial model."
)
UNTUNED = "Each minus the cell whose settings it has but for its change; none is tuned for itself."


def state(name: str, file: Path, plan: Plan, records: Mapping[str, Record]) -> str:
    """Return how much of the plan is in the page, and what it was made with."""
    runs = {frozenset(r.command): r for r in records.values()}.values()  # one may stand in two blocks
    far = sum(bool(drifted({"before": r.before, "after": r.after})) for r in runs)
    machines = Counter(", ".join(f"{k} {v}" for k, v in r.machine.items()) for r in runs)
    commits = Counter(r.commit for r in runs)
    made = "; ".join(
        f"{n} runs on {machine or 'a machine not noted'}" for machine, n in machines.most_common()
    )
    at = "; ".join(f"{n} at `{(commit or 'no noted commit')[:12]}`" for commit, n in commits.most_common())
    return (
        f"{told(plan, records)}. {len(runs)} runs are in this page, {far} of which went far from their "
        "start (ten tokens longer answers, or more than 1 nat a token)."
        + (f" Made by `python -m study {name}`: {made}; {at}. " if records else " ")
        + "Each line of a file of records is a run: `python train.py` with its `command` and "
        "`idle_settings=note` repeats it, to the last digit on a processor of the same kind. The plan "
        f"is `study/{file.name}`."
    )


def tests_table(name: str, decisions: Sequence[Decision]) -> Table:
    rows = [["claim", "held equal", "n", "effect", "95 % interval", "p, Holm", "decided", "command"]]
    for d in decisions:
        low, high = d.effect.interval if d.effect else (0.0, 0.0)
        rows.append(
            [
                d.test.claim,
                d.test.held,
                f"{d.n} of {len(d.block.sweep.seeds)}",
                f"{d.effect.value:+.1f}" if d.effect else "–",
                f"[{low:+.1f}, {high:+.1f}]" if d.effect else "–",
                f"{d.p_holm:.2g}" if d.effect and d.p_holm is not None else "–",
                d.word,
                f"`python -m study {name} --only {d.block.sweep.name}`",
            ]
        )
    return rows


def planned_table(plan: Plan, decisions: Sequence[Decision]) -> Table:
    rows = [["test", "asks", "smallest effect", "SD planned", "measured in", "seeds", "power", "SD seen"]]
    for decision in decisions:
        test, block = decision.test, decision.block
        seeds = len(block.sweep.seeds)
        seen = decision.effect.error * math.sqrt(seeds) if decision.effect and decision.effect.error else None
        power = f"{planned_power(test, seeds, plan.level):.2f}"
        asks = " − ".join(reversed(list(block.sweep.cells))) + (" = 0?" if test.kind == SAME else "")
        measured = " − ".join(test.measured)
        numbers = [f"{test.effect:g}", f"{test.deviation:g}", measured, str(seeds), power]
        rows.append([block.sweep.name, asks, *numbers, "–" if seen is None else f"{seen:.2g}"])
    return rows


# -- effects -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Effect:
    """A cell minus the one that it is compared with. ``runs``: the block, and the point of its grid."""

    runs: str
    cell: str
    base: str
    score: float
    base_score: float
    difference: SeedMean


def effects_of(plan: Plan, blocks: Sequence[Block], values: Values) -> list[Effect]:
    """Return the effect of each cell that has seeds in common with its base."""
    effects = []
    for block in blocks:
        for cell, at in block.sweep.coordinates.items():
            base = plan.base(block, at)
            other, own = values.get(base, {}), values.get(cell, {})
            apart = mean([own[seed] - other[seed] for seed in sorted(own.keys() & other.keys())])
            if cell != base and apart is not None:
                runs, short = " ".join((block.sweep.name, *at[1:])), base.removeprefix(f"{block.sweep.name}-")
                short = short.removesuffix("-".join(("", *at[1:])))
                score, base_score = fmean(own.values()), fmean(other.values())
                effects.append(Effect(runs, at[0], short, score, base_score, apart))
    return effects


def effects_table(effects: Sequence[Effect]) -> Table:
    rows = [["runs", "cell − base", "score", "score of base", "effect", "95 % interval", "seeds"]]
    for e in effects:
        scores = (f"{value:.1f}" for value in (e.score, e.base_score))
        rows.append([e.runs, f"{e.cell} − {e.base}", *scores, *shown(e.difference)])
    return rows


def beside_table(blocks: Sequence[Block], records: Mapping[str, Record]) -> Table:
    rows = [["runs", "cell", "score", "greedy", "tokens, start", "tokens", "KL", "CPU s", "seeds"]]
    for block in blocks:
        for cell, at in block.sweep.coordinates.items():
            if not (runs := [record for record in records.values() if record.cell == cell]):
                continue
            scores = [100 * mean_over([r.after for r in runs], key) for key in (SAMPLED, GREEDY)]
            tokens = [
                mean_over(sides, LENGTH) for sides in ([r.before for r in runs], [r.after for r in runs])
            ]
            kl = mean_over([r.after for r in runs], KL)
            seconds = mean_over([r.seconds for r in runs], "cpu")
            numbers = (f"{value:.1f}" for value in (*scores, *tokens))
            rows.append(
                [block.sweep.name, " ".join(at), *numbers, f"{kl:.3f}", f"{seconds:.0f}", str(len(runs))]
            )
    return rows


def mean_over(measured: Sequence[Mapping[str, float]], key: str) -> float:
    """Return the mean over the runs that have ``key``; nan if none has."""
    there = [values[key] for values in measured if key in values]
    return fmean(there) if there else math.nan


def figure_of(kind: str, blocks: Sequence[Block], values: Values, effects: Sequence[Effect]) -> Figure | None:
    if kind == MAIN:
        return variants_figure(blocks, values)
    if kind == "lag":
        return lag_figure(blocks, values)
    return (
        effects_figure([(f"{e.runs}, {e.cell}", e.difference) for e in effects]) if kind in CAPTIONS else None
    )
