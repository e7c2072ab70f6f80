"""The figures of diagnostics.jsonl (docs/diagnostics.md)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from reports.charts import BLUE, GREEN, ORANGE, PURPLE, STYLE, Curve, Panel, Record, charts, put_legend, svg

COLORS = {"chosen": BLUE, "rejected": ORANGE, "neutral": PURPLE}
PANELS = (
    Panel(
        "Drift from the initial weights",
        "nats per token",
        (Curve("drift_chosen", "chosen", BLUE, True), Curve("drift_rejected", "rejected", ORANGE, True)),
    ),
    Panel(
        "Entropy of the policy", "nats per token, held-out completions", (Curve("entropy", "", GREEN, True),)
    ),
)


def diagnostic_charts(lines: Sequence[Record]) -> list[tuple[str, bytes]]:
    """Return (title, SVG) of the figures; none if the file lacks its first line or has no interval."""
    if len(lines) < 2 or "edges" not in lines[0]:
        return []
    first, intervals = lines[0], lines[1:]
    with matplotlib.rc_context(STYLE):
        drawn = [
            ("Spread of the log-ratios", svg(spread(first, intervals))),
            ("Beyond the clipping range, by position", svg(by_position(first, intervals))),
        ]
    return [*drawn, *charts([{"step": 0, "entropy": first["entropy"]}, *map(flattened, intervals)], PANELS)]


def flattened(line: Record) -> Record:
    """Return an interval as a line of metrics: ``drift_chosen`` …, and the entropy at its end."""
    sides = {side: line[side] for side in COLORS if side in line}
    drift = {f"drift_{side}": values["drift"] for side, values in sides.items()}
    return {"step": line["step"] + 1, "entropy": line["entropy"]} | drift


def spread(first: Record, intervals: Sequence[Record]) -> Figure:
    """Draw the root mean square of the log-ratios over the steps, with the noise floor below it."""
    figure, axes = _axes("Spread of the log-ratios", "nats, root mean square")
    for side, color in COLORS.items():
        points = [
            (line["step"] + 1, line[side]["spread"])
            for line in intervals
            if side in line and line[side]["spread"]
        ]
        if points:
            axes.plot(
                *np.array(points, float).T, color=color, label=side, marker="o", markersize=3.5, linewidth=1.4
            )
    if noise := (first["noise"] or {}).get("rms"):
        axes.axhline(noise, color="#888888", linestyle=":", label=f"noise of a log-ratio, {noise:.1g}")
    axes.set_yscale("log")
    put_legend(figure, axes)  # nothing is drawn if the reference was synced at every step shown
    return figure


def by_position(first: Record, intervals: Sequence[Record]) -> Figure:
    """Draw the share of tokens below and above the clipping range at each position of their completion, over
    the whole run."""
    title = "Beyond the clipping range, by position" + ("" if first["clips"] else " (nothing is clipped)")
    figure, axes = _axes(title, "share of the tokens there")
    longest = 0
    for side, color in COLORS.items():
        parts = [line[side]["positions"] for line in intervals if side in line]
        totals = np.zeros((max(map(len, parts), default=0), 3))
        for part in parts:
            totals[: len(part)] += part
        longest = max(longest, len(totals))
        for column, name, style in ((1, "below log_epsilon_P", "--"), (2, "above log_epsilon_R", "-")):
            if len(totals):
                axes.plot(
                    totals[:, column] / totals[:, 0],
                    color=color,
                    linestyle=style,
                    marker="o",
                    markersize=3.5,
                    linewidth=1.4,
                    label=f"{side}, {name}",
                )
    axes.set_xlabel("position in the completion (tokens, from 1)")
    names = [f"{2**p}–{2 ** (p + 1) - 1}" if p else "1" for p in range(longest)]
    axes.set_xticks(range(longest), names, rotation=30 if longest > 7 else 0)
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1.0))
    axes.set_ylim(bottom=0.0, top=max(axes.get_ylim()[1], 1e-3))
    put_legend(figure, axes)
    return figure


def _axes(title: str, unit: str) -> tuple[Figure, Any]:
    figure = Figure(figsize=(5.4, 2.9), layout="constrained")
    axes = figure.subplots()
    axes.set_title(title)
    axes.set_xlabel("optimizer step")
    axes.set_ylabel(unit)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True))
    return figure, axes
