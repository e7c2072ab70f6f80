"""The figures of the study's pages: means with 95 % confidence intervals over seeds, and runs as dots."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure

from launch.frontier import Frontier
from launch.pictures import STYLE
from reports import charts
from reports.statistics import SeedMean, mean
from study.plan import Block, Values
from study.tasks import TITLES

RED, BLUE, ORANGE, PURPLE, GREY, GREEN = "#C0392B", "#0072B2", "#E69F00", "#AA5C99", "#888888", "#009E73"
VARIANTS = {"offline": RED, "offline-hl": ORANGE, "online": BLUE, "online-hl": PURPLE}
LOSSES = ("dpo", "kto", "grpo")
POINTS = "points of 100"


def svg(figure: Figure) -> bytes:
    """Return the figure as SVG; the same runs give the same bytes."""
    with rc_context(STYLE):
        return charts.svg(figure, bbox_inches="tight")


def canvas(columns: int, width: float, height: float, rows: int = 1, **keywords: Any) -> tuple[Figure, Any]:
    with rc_context(STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        return figure, figure.subplots(rows, columns, squeeze=False, **keywords)


def grid_of(
    blocks: Iterable[Block], height: float, **keywords: Any
) -> tuple[Figure, Any, Callable[[Block], Any]]:
    """Return a figure with a row for each task of the blocks and a column for each loss, its axes, and what
    gives a block's axes, with their title."""
    blocks = list(blocks)
    tasks = [task for task in TITLES if task in {block.task for block in blocks}]
    losses = [loss for loss in LOSSES if loss in {block.loss for block in blocks}]
    figure, axes = canvas(len(losses), 11 * len(losses) / 3, height * len(tasks), len(tasks), **keywords)

    def place(block: Block) -> Any:
        ax = axes[tasks.index(block.task)][losses.index(block.loss)]
        ax.set_title(f"{block.loss.upper()}, {TITLES[block.task]}", fontsize=9)
        return ax

    return figure, axes, place


def variants_figure(blocks: Sequence[Block], values: Values) -> Figure | None:
    """Draw each cell of the blocks: mean, interval and every seed."""
    if not any(name in values for block in blocks for name in block.sweep.coordinates):
        return None
    figure, axes, place = grid_of(blocks, 2.5, sharey="row")
    for block in blocks:
        ax = place(block)
        for x, cell in enumerate(block.sweep.cells):
            points = list(values.get(f"{block.sweep.name}-{cell}", {}).values())
            color = VARIANTS.get(cell, GREY)
            ax.plot([x] * len(points), points, ".", color=color, markersize=4, alpha=0.5)
            if (middle := mean(points)) is not None and middle.error is not None:
                ax.plot([x, x], middle.interval, color="black", linewidth=1)
            if middle is not None:
                ax.plot(x, middle.value, "o", color=color, markeredgecolor="black")
        ax.set_xticks(range(len(block.sweep.cells)), list(block.sweep.cells), fontsize=7.5)
    for row in axes:
        row[0].set_ylabel(POINTS)
    return figure


def surface_figure(arms: Mapping[str, tuple[Block, Frontier]]) -> Figure | None:
    if not arms:
        return None
    colors = {"plain": RED, "k1": ORANGE, "k16": PURPLE, "online": BLUE}
    figure, axes, place = grid_of((block for block, _ in arms.values()), 3.2, sharey="row")
    for block, surface in arms.values():
        ax = place(block)
        for arm, points in surface.arms.items():
            dots = [(p.kl[s], p.score[s]) for p in points.values() for s in p.score.keys() & p.kl.keys()]
            ax.plot(*zip(*dots, strict=True), ".", color=colors.get(arm, GREY), markersize=3, alpha=0.5)
            lines = [line for seed in surface.seeds if len((line := surface.frontier(arm, seed))[0])]
            at = np.geomspace(max(kl[0] for kl, _ in lines) + 1e-4, min(kl[-1] for kl, _ in lines), 60)
            middle = np.mean([np.interp(at, *line) for line in lines], axis=0)
            ax.plot(at, middle, color=colors.get(arm, GREY), label=arm)
        ax.set_xscale("log")
        ax.set_xlabel("KL from the start, nats a token")
    for row in axes:
        row[0].set_ylabel(POINTS)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, ncols=4, loc="outside upper center", fontsize=8)
    return figure


def effects_figure(effects: Sequence[tuple[str, SeedMean]]) -> Figure | None:
    """Draw named effects with their intervals, a row each."""
    rows = [(name, effect) for name, effect in effects if effect.error is not None]
    if not rows:
        return None
    figure, ((ax,),) = canvas(1, 6, 0.6 + 0.25 * len(rows))
    for y, (_, effect) in enumerate(rows):
        ax.plot(effect.interval, [y, y], color=BLUE)
        ax.plot(effect.value, y, "o", color=BLUE, markersize=4)
    ax.axvline(0, color=RED, linestyle=":")
    ax.set_yticks(range(len(rows)), [name for name, _ in rows])
    ax.invert_yaxis()
    ax.set_xlabel(POINTS)
    return figure


def lag_figure(blocks: Sequence[Block], values: Values) -> Figure | None:
    """Draw the mean score against the mean lag d of the reference, for each schedule."""
    if not any(f"{block.sweep.name}-d1" in values for block in blocks):
        return None
    colors = {"delayed": GREEN, "periodic": ORANGE, "ema": PURPLE}
    figure, axes, place = grid_of(blocks, 3.2)

    def middle(cell: str) -> float:
        return fmean(values[cell].values()) if cell in values else math.nan

    for block in blocks:
        name, ax = block.sweep.name, place(block)
        for schedule, color in colors.items():
            scores = [middle(f"{name}-d1"), *(middle(f"{name}-d{d}-{schedule}") for d in (2, 4, 8))]
            ax.plot((1, 2, 4, 8), scores, "o-", color=color, label=schedule, markersize=3)
        ax.axhline(middle(f"{name}-fixed"), color=RED, linestyle=":")
        ax.set_xscale("log", base=2)
        ax.set_xlim(0.9, 9)  # also where no run is there yet
        ax.set_xticks((1, 2, 4, 8), ("1", "2", "4", "8"))
        ax.set_xlabel("mean lag of the reference, steps")
        ax.set_ylabel(POINTS)
    axes[0][0].legend(fontsize=7.5)
    return figure
