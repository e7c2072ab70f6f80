"""Rate, anchor and distance: the surface's arms at equal numbers of tried settings, humanline by its distance
from the start, and a law fitted on one task and tested on the other."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import combinations_with_replacement
from statistics import fmean

import numpy as np
from scipy import stats

from launch.cells import Cell
from launch.collect import Result
from launch.frontier import KL, Frontier
from launch.outcomes import Status
from reports.outcome import FINISHED
from reports.statistics import mean
from study.markdown import Table, shown
from study.plan import Block, Plan
from study.records import SAMPLED, Record
from study.tasks import TITLES


def frontier(block: Block, records: Mapping[str, Record]) -> Frontier | None:
    """Return the arms of a surface's block, scores in points, from the seeds whose runs are all there; None
    before the first is."""
    missing = {run.seed for run in block.runs if run.name not in records}
    if block.kind != "surface" or missing == set(block.sweep.seeds):
        return None
    results_by_cell: dict[str, list[Result]] = {}
    for run in block.runs:
        if run.seed not in missing:
            record = records[run.name]
            points = record.after | {SAMPLED: 100 * record.after[SAMPLED]}
            result = Result(run.name, run.cell, run.seed, Status(FINISHED), {}, points)
            results_by_cell.setdefault(run.cell, []).append(result)
    return Frontier.of(
        block.sweep, [Cell(name, runs, [], {}) for name, runs in results_by_cell.items()], SAMPLED
    )


def surface_table(arms: Mapping[str, tuple[Block, Frontier]]) -> Table:
    rows = [["loss, task", "arm − plain", "held equal", "effect", "95 % interval", "seeds", "edge"]]
    for block, surface in arms.values():
        for name, apart in surface.differences():
            kind, _, arm = name.rpartition(": ")
            if (effect := mean(apart)) is None:
                continue
            edges = {a: ", ".join(surface.edges(surface.best(a))) or "none" for a in ("plain", arm)}
            at = f"plain {edges['plain']}; {arm} {edges[arm]}" if kind == "each tuned" else "–"
            rows.append([f"{block.loss.upper()}, {TITLES[block.task]}", arm, kind, *shown(effect), at])
    return rows


BINS = {
    "0.1 nats a token at most": (-math.inf, 0.1),
    "0.1 to 0.3": (0.1, 0.3),
    "0.3 to 1": (0.3, 1.0),
    "more": (1.0, math.inf),
}


def near_table(plan: Plan, records: Mapping[str, Record]) -> Table:
    """Return humanline minus plain by task, k and bins of humanline's excess KL."""
    rows = [["task", "k", *BINS]]
    pairs: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for block in plan.blocks:
        for run in block.runs if block.kind == "surface" else ():
            arm = block.sweep.coordinates[run.cell][0]
            other = records.get(run.name.replace(f"-{arm}-", "-plain-", 1))
            own = records.get(run.name)
            if arm in ("k1", "k16") and own and other:
                excess, effect = (own.after[key] - other.after[key] for key in (KL, SAMPLED))
                pairs.setdefault((TITLES[block.task], arm.lstrip("k")), []).append((excess, 100 * effect))
    for (task, k), points in sorted(pairs.items()):
        cells = [[effect for excess, effect in points if low < excess <= high] for low, high in BINS.values()]
        rows.append([task, k, *map(counted, cells)])
    return rows


def counted(effects: Sequence[float]) -> str:
    positive = sum(effect > 0 for effect in effects)
    return f"{fmean(effects):+.1f}; {positive} of {len(effects)} positive" if effects else "–"


STEPS = 80
FEATURES = 17
"""three constants, four logarithms, ten of their products"""
ENOUGH = 0.8


def law(plan: Plan, records: Mapping[str, Record]) -> str:
    """Return what a law fitted on one task says about the other. It is a quadratic polynomial of the
    logarithms of rate, anchor, k (plain: the run's steps) and KL from the start, with a constant for each
    loss, fitted by least squares to the means over seeds of the offline arms' gains."""
    data = {task: law_rows(plan, records, task) for task in TITLES}
    correlations, said = [], []
    for fitted, tested in (("adder", "instruct"), ("instruct", "adder")):
        (x, y), (x_other, y_other) = data[fitted], data[tested]
        if len(y) < 2 * x.shape[1] or len(y_other) < 2 * x.shape[1]:
            return "**A law?** Not enough of both surfaces is there yet."
        weights = np.linalg.lstsq(x, y, rcond=None)[0]
        rho = float(stats.spearmanr(x_other @ weights, y_other).statistic)
        correlations.append(rho)
        said.append(
            f"fitted on {TITLES[fitted]}, tested on {TITLES[tested]}: {rho:.2f} ({len(y_other)} settings)"
        )
    wanted = sum(
        len({run.cell for run in block.runs if not run.settings.get("online")})
        for block in plan.blocks
        if block.kind == "surface"
    )
    there = sum(len(y) for _, y in data.values())
    decided = "a law" if min(correlations) >= ENOUGH else "no law"
    return (
        f"**A law?** Score from rate, anchor, k and distance, rank correlation {'; '.join(said)}. "
        f"It would have to be {ENOUGH} both ways: "
        + (f"**{decided}**." if there >= wanted else f"not decided, {there} of {wanted} settings are there.")
    )


def law_rows(plan: Plan, records: Mapping[str, Record], task: str) -> tuple[np.ndarray, np.ndarray]:
    """Return ([n, features], [n] points gained since the start)."""
    rows, gains = [], []
    for block in plan.blocks:
        if block.task != task or block.kind != "surface":
            continue
        cells: dict[str, list[Record]] = {}
        for run in block.runs:
            if run.name in records and not run.settings.get("online"):
                cells.setdefault(run.cell, []).append(records[run.name])
        settings = {run.cell: run.settings for run in block.runs}
        ((anchor, _),) = block.sweep.grid[1][0].items()
        middle = np.median([point[anchor] for point in block.sweep.grid[1]])
        for cell, cell_records in cells.items():
            s = settings[cell]
            strength = math.log(s[anchor] / middle) * (-1 if block.loss == "grpo" else 1)
            k = s["sync_freq"] if s.get("humanline") else STEPS
            kl = fmean(r.after[KL] for r in cell_records)
            logs = [math.log(s["lr"]), strength, math.log(k), math.log(max(kl, 1e-4))]
            products = [a * b for a, b in combinations_with_replacement(logs, 2)]
            rows.append([*(float(block.loss == loss) for loss in ("dpo", "kto", "grpo")), *logs, *products])
            gains.append(fmean(100 * (r.after[SAMPLED] - r.before[SAMPLED]) for r in cell_records))
    return np.array(rows).reshape(len(gains), FEATURES), np.array(gains)
