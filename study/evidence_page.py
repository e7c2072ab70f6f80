"""The page of the evidence, made of the records that there are: limits, one table of the twelve tests, then
what is exploratory with a figure for each question.

The files are ``<out>/report.md`` and its figures. An unfinished test shows its progress and no number.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations_with_replacement
from pathlib import Path
from statistics import fmean

import numpy as np
from matplotlib.figure import Figure
from scipy import stats

from common.files import write_whole
from launch.cells import Cell
from launch.collect import Result
from launch.frontier import Frontier
from launch.outcomes import Status
from reports.outcome import FINISHED, drifted
from reports.statistics import SIGNIFICANT, Mean, holm, mean, paired, paired_power
from study.claims import interval
from study.evidence import DIFFERENT, SAME, Block, Evidence, Test, told
from study.figures import BLUE, GREEN, KL, ORANGE, PURPLE, RED, SAMPLED, canvas, svg
from study.pages import Section, Table, as_markdown
from study.records import Record

TASKS = {"adder": "sums", "instruct": "stories"}
TITLE = "Is humanline more than a larger rate with a weaker anchor?"
CAPTIONS = {
    "surface": "Score against the KL from the start, nats a token: every run, and each arm's frontier.",
    "factors": "Humanline minus plain in points, with 95 % intervals over seeds.",
    "anchors": "Each minus fixed anchors in points, with 95 % intervals over seeds.",
    "lag": "Score against the mean lag d of the reference, by schedule; dotted: a reference that stays.",
}
LIMITS = (
    "**Limits.** One model of 0.6 million parameters, one initial model and one data set a task; 80 steps; "
    "no GPU. Seeds change the order of the data, which half of it is trained on and what is sampled, so "
    "intervals cover seeds alone and understate what another model or data set would give. Points are of "
    "100: sampled accuracy on sums, true reward on stories. At k = 1 the three losses are one experiment on "
    "stories, and DPO stands for all. Settings of the tests come from earlier runs of the same two tasks; "
    "their seeds and prompts are new, the tasks are not."
)
Values = Mapping[str, Mapping[int, float]]


@dataclass(frozen=True)
class Decision:
    """``effect``: the second cell minus the first, in points; None until all seeds are there. ``p_holm``: of
    ``p_of``, corrected over all tests, unfinished ones counting as 1."""

    block: Block
    test: Test
    n: int
    effect: Mean | None = None
    p_holm: float | None = None
    word: str = "not decided: not run to its end"


def decide(plan: Evidence, values: Values) -> list[Decision]:
    """Return the decision of each test. ``values``: cell -> seed -> points."""
    found = []
    for block in plan.tests:
        assert block.test is not None
        a, b = (values.get(f"{block.sweep.name}-{cell}", {}) for cell in block.sweep.cells)
        apart = [b[seed] - a[seed] for seed in sorted(a.keys() & b.keys())]
        whole = len(apart) == len(block.sweep.seeds)
        found.append((block, block.test, apart, p_of(block.test, apart) if whole else None))
    corrected = holm([1.0 if p is None else p for *_, p in found])
    decisions = [Decision(block, test, len(apart)) for block, test, apart, _ in found]
    return [
        decision
        if p is None or held is None
        else replace(decision, effect=mean(apart), p_holm=held, word=word_of(test, apart, held, plan.level))
        for decision, (_, test, apart, p), held in zip(decisions, found, corrected, strict=True)
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


def write_page(plan: Evidence, records: Mapping[str, Record], out: Path) -> str:
    """Write the page and its figures; return the text to print."""
    out.mkdir(parents=True, exist_ok=True)
    values: dict[str, dict[int, float]] = {}
    for record in records.values():
        if SAMPLED in record.after:
            values.setdefault(record.cell, {})[record.seed] = 100 * record.after[SAMPLED]
    arms = {b.sweep.name: f for b in plan.blocks if (f := frontier(b, records)) is not None}
    factors, anchors = (against(plan, values, *pair) for pair in (("factors", "plain"), ("anchors", "fixed")))
    figures = {
        "surface": surface_figure(arms),
        "factors": effects_figure(factors),
        "lag": lag_figure(plan, values),
        "anchors": effects_figure(anchors),
    }
    drawn = {stem: figure for stem, figure in figures.items() if figure is not None}
    for stem, figure in drawn.items():
        (out / f"{stem}.svg").write_bytes(svg(figure))

    def captioned(stem: str) -> tuple[str, str] | None:
        return (stem, CAPTIONS[stem]) if stem in drawn else None

    sections = [
        Section("", (LIMITS, state(plan, records))),
        Section("The tests", (TESTS.format(len(plan.tests)),), tests_table(decide(plan, values))),
        Section("How the tests were planned", (PLANNED.format(plan.level),), planned_table(plan, values)),
        Section(
            "Rate, anchor, distance (exploratory)",
            (SURFACE,),
            surface_table(arms),
            captioned("surface"),
        ),
        Section("At one rate and anchor, by distance (exploratory)", (NEAR,), near_table(plan, records)),
        Section("", (law(plan, records),)),
        Section(
            "What turns the sign on sums (exploratory)",
            (FACTORS,),
            factors,
            captioned("factors"),
        ),
        Section(
            "Lag or jump (exploratory)",
            (LAG,),
            against(plan, values, "lag", "d1"),
            captioned("lag"),
        ),
        Section("Which anchor (exploratory)", (ANCHORS,), anchors, captioned("anchors")),
    ]
    write_whole(out / "report.md", as_markdown(TITLE, sections))
    return f"The page: {out}/report.md"


TESTS = (
    "{} tests on both tasks in one family; everything else on this page is exploratory. The effect is the "
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
FACTORS = (
    "DPO on sums at one rate and anchor: each arm minus plain on the same pairs. `three` is to be read "
    "against `one`, the others against `none`."
)
LAG = "Each schedule minus d = 1, where the three schedules are one."
ANCHORS = (
    "GRPO with a KL penalty of two weights: neither anchor moves (`fixed`), both move (`both`), or the "
    "ratio's alone (`ratio`). A moving KL anchor with a fixed ratio was not run: no setting has it."
)


def state(plan: Evidence, records: Mapping[str, Record]) -> str:
    """Return how much of the plan is in the page, and what it was made with."""
    far = sum(bool(drifted({"before": r.before, "after": r.after})) for r in records.values())
    machines = Counter(", ".join(f"{k} {v}" for k, v in r.machine.items()) for r in records.values())
    commits = Counter(r.commit for r in records.values())
    made = "; ".join(f"{n} runs on {name}" for name, n in machines.most_common())
    at = "; ".join(f"{n} at `{(commit or 'no noted commit')[:12]}`" for commit, n in commits.most_common())
    return (
        f"{told(plan, records)}. {len(records)} records are in this page, {far} of which went far from their "
        "start (ten tokens longer answers, or more than 1 nat a token)."
        + (f" Made by `python -m study evidence`: {made}; {at}. " if records else " ")
        + "Each line of `runs.jsonl` is a run: `python train.py` with its `command` and "
        "`idle_settings=note` repeats it. "
        "[The plan](../../../study/evidence.yaml) was committed before the first record."
    )


def tests_table(decisions: Sequence[Decision]) -> Table:
    rows = [["claim", "held equal", "n", "effect", "95 % interval", "p, Holm", "decided", "command"]]
    for d in decisions:
        low, high = interval(d.effect) if d.effect else (0.0, 0.0)
        rows.append(
            [
                d.test.claim,
                d.test.held,
                f"{d.n} of {len(d.block.sweep.seeds)}",
                f"{d.effect.value:+.1f}" if d.effect else "–",
                f"[{low:+.1f}, {high:+.1f}]" if d.effect else "–",
                f"{d.p_holm:.2g}" if d.effect and d.p_holm is not None else "–",
                d.word,
                f"`python -m study evidence --only {d.block.sweep.name}`",
            ]
        )
    return rows


def planned_table(plan: Evidence, values: Values) -> Table:
    rows = [["test", "asks", "smallest effect", "SD planned", "measured in", "seeds", "power", "SD seen"]]
    for decision in decide(plan, values):
        test, block = decision.test, decision.block
        seeds = len(block.sweep.seeds)
        seen = decision.effect.error * math.sqrt(seeds) if decision.effect and decision.effect.error else None
        power = f"{planned_power(test, seeds, plan.level):.2f}"
        asks = " − ".join(reversed(list(block.sweep.cells))) + (" = 0?" if test.kind == SAME else "")
        measured = " − ".join(test.measured)
        numbers = [f"{test.effect:g}", f"{test.deviation:g}", measured, str(seeds), power]
        rows.append([block.sweep.name, asks, *numbers, "–" if seen is None else f"{seen:.2g}"])
    return rows


# -- the surface -------------------------------------------------------------------------------------


def frontier(block: Block, records: Mapping[str, Record]) -> Frontier | None:
    """Return the arms of a surface's block, scores in points, from the seeds whose runs are all there; None
    before the first is."""
    missing = {run.seed for run in block.runs if run.name not in records}
    if not block.sweep.name.startswith("surface") or missing == set(block.sweep.seeds):
        return None
    of: dict[str, list[Result]] = {}
    for run in block.runs:
        if run.seed not in missing:
            record = records[run.name]
            points = record.after | {SAMPLED: 100 * record.after[SAMPLED]}
            result = Result(run.name, run.cell, run.seed, Status(FINISHED), {}, points)
            of.setdefault(run.cell, []).append(result)
    return Frontier.of(block.sweep, [Cell(name, runs, [], {}) for name, runs in of.items()], SAMPLED)


def title_of(name: str) -> str:
    task, loss = name.split("-")[1:3]
    return f"{loss.upper()}, {task}"


def surface_table(arms: Mapping[str, Frontier]) -> Table:
    rows = [["loss, task", "arm − plain", "held equal", "effect", "95 % interval", "seeds", "edge"]]
    for name, found in arms.items():
        for c in found.contrasts():
            kind, _, arm = c.b.rpartition(": ")
            edges = {a: ", ".join(found.edges(found.best(a))) or "none" for a in ("plain", arm)}
            at = f"plain {edges['plain']}; {arm} {edges[arm]}" if kind == "each tuned" else "–"
            rows.append([title_of(name), arm, kind, *shown(c.difference), at])
    return rows


def shown(value: Mean) -> list[str]:
    low, high = interval(value)
    inside = f"[{low:+.1f}, {high:+.1f}]" if value.error is not None else "–"
    return [f"{value.value:+.1f}", inside, str(value.n)]


def surface_figure(arms: Mapping[str, Frontier]) -> Figure | None:
    if not arms:
        return None
    colors = {"plain": RED, "k1": ORANGE, "k16": PURPLE, "online": BLUE}
    figure, axes = canvas(3, 11, 6.4, rows=2, sharey="row")
    for name, found in arms.items():
        task, loss = name.split("-")[1:3]
        ax = axes[list(TASKS.values()).index(task)][("dpo", "kto", "grpo").index(loss)]
        ax.set_title(title_of(name), fontsize=9)
        for arm, points in found.arms.items():
            dots = [(p.kl[s], p.score[s]) for p in points.values() for s in p.score.keys() & p.kl.keys()]
            ax.plot(*zip(*dots, strict=True), ".", color=colors[arm], markersize=3, alpha=0.5)
            lines = [line for seed in found.seeds if len((line := found.frontier(arm, seed))[0])]
            at = np.geomspace(max(kl[0] for kl, _ in lines) + 1e-4, min(kl[-1] for kl, _ in lines), 60)
            middle = np.mean([np.interp(at, *line) for line in lines], axis=0)
            ax.plot(at, middle, color=colors[arm], label=arm)
        ax.set_xscale("log")
        ax.set_xlabel("KL from the start, nats a token")
    for row in axes:
        row[0].set_ylabel("points of 100")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, ncols=4, loc="outside upper center", fontsize=8)
    return figure


BINS = {
    "0.1 nats a token at most": (-math.inf, 0.1),
    "0.1 to 0.3": (0.1, 0.3),
    "0.3 to 1": (0.3, 1.0),
    "more": (1.0, math.inf),
}


def near_table(plan: Evidence, records: Mapping[str, Record]) -> Table:
    """Return humanline minus plain by task, k and bins of humanline's excess KL."""
    rows = [["task", "k", *BINS]]
    pairs: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for block in plan.blocks:
        for run in block.runs if block.sweep.name.startswith("surface") else ():
            arm = block.sweep.coordinates[run.cell][0]
            other = records.get(run.name.replace(f"-{arm}-", "-plain-", 1))
            own = records.get(run.name)
            if arm in ("k1", "k16") and own and other:
                excess, effect = (own.after[key] - other.after[key] for key in (KL, SAMPLED))
                pairs.setdefault((TASKS[block.task], arm.lstrip("k")), []).append((excess, 100 * effect))
    for (task, k), found in sorted(pairs.items()):
        cells = [[effect for excess, effect in found if low < excess <= high] for low, high in BINS.values()]
        rows.append([task, k, *map(counted, cells)])
    return rows


def counted(effects: Sequence[float]) -> str:
    positive = sum(effect > 0 for effect in effects)
    return f"{fmean(effects):+.1f}; {positive} of {len(effects)} positive" if effects else "–"


# -- the law -----------------------------------------------------------------------------------------

STEPS = 80
FEATURES = 17
"""three constants, four logarithms, ten of their products"""
ENOUGH = 0.8


def law(plan: Evidence, records: Mapping[str, Record]) -> str:
    """Return what a law fitted on one task says about the other. It is a quadratic polynomial of the
    logarithms of rate, anchor, k (plain: the run's steps) and KL from the start, with a constant for each
    loss, fitted by least squares to the means over seeds of the offline arms' gains."""
    data = {task: law_rows(plan, records, task) for task in TASKS}
    found, said = [], []
    for fitted, tested in (("adder", "instruct"), ("instruct", "adder")):
        (x, y), (x_other, y_other) = data[fitted], data[tested]
        if len(y) < 2 * x.shape[1] or len(y_other) < 2 * x.shape[1]:
            return "**A law?** Not enough of both surfaces is there yet."
        weights = np.linalg.lstsq(x, y, rcond=None)[0]
        rho = float(stats.spearmanr(x_other @ weights, y_other).statistic)
        found.append(rho)
        said.append(
            f"fitted on {TASKS[fitted]}, tested on {TASKS[tested]}: {rho:.2f} ({len(y_other)} settings)"
        )
    wanted = sum(
        len({run.cell for run in block.runs if not run.settings.get("online")})
        for block in plan.blocks
        if block.sweep.name.startswith("surface")
    )
    there = sum(len(y) for _, y in data.values())
    decided = "a law" if min(found) >= ENOUGH else "no law"
    return (
        f"**A law?** Score from rate, anchor, k and distance, rank correlation {'; '.join(said)}. "
        f"It would have to be {ENOUGH} both ways: "
        + (f"**{decided}**." if there >= wanted else f"not decided, {there} of {wanted} settings are there.")
    )


def law_rows(plan: Evidence, records: Mapping[str, Record], task: str) -> tuple[np.ndarray, np.ndarray]:
    """Return ([n, features], [n] points gained since the start)."""
    rows, gains = [], []
    for block in plan.blocks:
        if block.task != task or not block.sweep.name.startswith("surface"):
            continue
        cells: dict[str, list[Record]] = {}
        for run in block.runs:
            if run.name in records and not run.settings.get("online"):
                cells.setdefault(run.cell, []).append(records[run.name])
        settings = {run.cell: run.settings for run in block.runs}
        ((anchor, _),) = block.sweep.grid[1][0].items()
        middle = np.median([point[anchor] for point in block.sweep.grid[1]])
        for cell, found in cells.items():
            s = settings[cell]
            strength = math.log(s[anchor] / middle) * (-1 if block.loss == "grpo" else 1)
            k = s["sync_freq"] if s.get("humanline") else STEPS
            kl = fmean(r.after[KL] for r in found)
            logs = [math.log(s["lr"]), strength, math.log(k), math.log(max(kl, 1e-4))]
            products = [a * b for a, b in combinations_with_replacement(logs, 2)]
            rows.append([*(float(block.loss == loss) for loss in ("dpo", "kto", "grpo")), *logs, *products])
            gains.append(fmean(100 * (r.after[SAMPLED] - r.before[SAMPLED]) for r in found))
    return np.array(rows).reshape(len(gains), FEATURES), np.array(gains)


# -- lag, factors, anchors ---------------------------------------------------------------------------


def against(plan: Evidence, values: Values, kind: str, first: str) -> Table:
    """Return each cell of the blocks of a kind minus the ``first`` cell at the same point of the grid."""
    rows = [["runs", f"cell − {first}", "score", f"score of {first}", "effect", "95 % interval", "seeds"]]
    for block in plan.blocks:
        if not block.sweep.name.startswith(kind):
            continue
        for cell, (arm, *at) in block.sweep.coordinates.items():
            other, own = values.get("-".join((block.sweep.name, first, *at)), {}), values.get(cell, {})
            apart = mean([own[seed] - other[seed] for seed in sorted(own.keys() & other.keys())])
            if arm != first and apart is not None:
                scores = (f"{fmean(v.values()):.1f}" for v in (own, other))
                name = " ".join((block.sweep.name, *at))
                rows.append([name, arm, *scores, *shown(apart)])
    return rows


def effects_figure(table: Table) -> Figure | None:
    """Draw the effects of ``against``, a row each."""
    rows = [row for row in table[1:] if row[-2] != "–"]
    if not rows:
        return None
    figure, ((ax,),) = canvas(1, 6, 0.6 + 0.25 * len(rows))
    for place, (_, _, _, _, effect, inside, _) in enumerate(rows):
        ax.plot([float(end) for end in inside.strip("[]").split(", ")], [place, place], color=BLUE)
        ax.plot(float(effect), place, "o", color=BLUE, markersize=4)
    ax.axvline(0, color=RED, linestyle=":")
    ax.set_yticks(range(len(rows)), [f"{name}, {arm}" for name, arm, *_ in rows])
    ax.invert_yaxis()
    ax.set_xlabel("points of 100")
    return figure


def lag_figure(plan: Evidence, values: Values) -> Figure | None:
    blocks = [b for b in plan.blocks if b.sweep.name.startswith("lag")]
    if not any(f"{b.sweep.name}-d1" in values for b in blocks):
        return None
    colors = {"delayed": GREEN, "periodic": ORANGE, "ema": PURPLE}
    figure, axes = canvas(3, 11, 6.4, rows=2)
    middle: Callable[[str], float] = lambda cell: fmean(values[cell].values()) if cell in values else math.nan  # noqa: E731
    for block in blocks:
        name = block.sweep.name
        task, loss = name.split("-")[1:3]
        ax = axes[list(TASKS.values()).index(task)][("dpo", "kto", "grpo").index(loss)]
        for schedule, color in colors.items():
            scores = [middle(f"{name}-d1"), *(middle(f"{name}-d{d}-{schedule}") for d in (2, 4, 8))]
            ax.plot((1, 2, 4, 8), scores, "o-", color=color, label=schedule, markersize=3)
        ax.axhline(middle(f"{name}-fixed"), color=RED, linestyle=":")
        ax.set_xscale("log", base=2)
        ax.set_title(title_of(name), fontsize=9)
        ax.set_xlabel("mean lag of the reference, steps")
        ax.set_ylabel("points of 100")
    axes[0][0].legend(fontsize=7.5)
    return figure
