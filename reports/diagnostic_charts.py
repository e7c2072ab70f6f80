"""The figures of diagnostics.jsonl (docs/diagnostics.md)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
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
        "Entropy of the policy",
        "nats per token, held-out completions",
        (Curve("entropy", "", GREEN, True),),
        from_zero=True,
    ),
    Panel(
        "Length of the completions",
        "tokens",
        (Curve("length_chosen", "chosen", BLUE, True), Curve("length_rejected", "rejected", ORANGE, True)),
        from_zero=True,
    ),
)


def diagnostic_charts(lines: Sequence[Record]) -> list[tuple[str, bytes]]:
    """Return (title, SVG) of the figures; none if the file lacks its first line or has no interval."""
    if len(lines) < 2 or "edges" not in lines[0]:
        return []
    first, intervals = lines[0], lines[1:]
    with matplotlib.rc_context(STYLE):
        drawn = [
            ("Log-ratios of the tokens", svg(log_ratios(first, intervals))),
            ("Spread of the log-ratios", svg(spread(first, intervals))),
            ("Beyond the clipping range, by position", svg(by_position(first, intervals))),
        ]
    return [*drawn, *charts([{"step": 0, "entropy": first["entropy"]}, *map(flattened, intervals)], PANELS)]


def flattened(line: Record) -> Record:
    """Return an interval as a line of metrics: ``drift_chosen`` …, measured at the interval's middle, and the
    entropy, measured at its end."""
    sides = {side: line[side] for side in COLORS if side in line}
    return {"step": line["step"] + 1, "entropy": line["entropy"]} | {
        f"{key}_{side}": values[key]
        for side, values in sides.items()
        for key in ("drift", "length", "spread")
    }


def log_ratios(first: Record, intervals: Sequence[Record]) -> Figure:
    """Draw a heat map: the share of an interval's tokens in each bin of log-ratios, over the steps. A bin's
    width doubles away from 0."""
    counts = np.array(
        [
            sum(np.array(line[side]["histogram"]) for side in first["sides"] if side in line)
            for line in intervals
        ],
        float,
    )
    shares = counts / counts.sum(axis=1, keepdims=True)
    used = np.flatnonzero(counts.sum(axis=0))
    low, high = max(used[0] - 1, 0), min(used[-1] + 2, len(counts[0]))
    figure, axes = _axes("Log-ratios of the tokens", "nats (distance from 0 on a log scale)")
    steps = np.array([line["first_step"] for line in intervals] + [intervals[-1]["step"] + 1])
    mesh = axes.pcolormesh(
        steps,
        np.arange(low, high + 1),
        np.ma.masked_equal(shares[:, low:high].T, 0.0),
        cmap="viridis",
        norm=LogNorm(max(shares[shares > 0].min(), 1e-5), 1.0),
        rasterized=True,
    )
    figure.colorbar(mesh, ax=axes, label="share of the tokens")
    edges, shown = first["edges"], (low, high)
    decades = [sign * 10.0**d for sign in (-1, 1) for d in (-5, -3, -1, 1)]
    ticks = [(height, value) for value in decades if (height := _height(edges, value, shown)) is not None]
    axes.set_yticks([height for height, _ in ticks], [f"{value:g}" for _, value in ticks])
    for name in ("log_epsilon_P", "log_epsilon_R"):
        _mark(axes, _height(edges, first[name], shown), f"{name} {first[name]}", "--")
    noise = (first["noise"] or {}).get("rms")
    for sign in (-1, 1):
        _mark(axes, _height(edges, sign * noise if noise else None, shown), "noise", ":")
    axes.grid(False)
    return figure


def _height(edges: Sequence[float], value: float | None, shown: tuple[int, int]) -> float | None:
    """Return the height of ``value`` nats on the heat map, whose bin k is drawn from k to k + 1; the position
    within a bin is logarithmic. None if the value is not shown."""
    if value is None or not edges[0] < value < edges[-1]:
        return None
    k = int(np.searchsorted(edges, value))  # edges[k - 1] < value <= edges[k]
    part = (
        0.5
        if edges[k - 1] * edges[k] < 0
        else math.log(value / edges[k - 1]) / math.log(edges[k] / edges[k - 1])
    )
    return k + part if shown[0] <= k + part <= shown[1] else None


def _mark(axes: Axes, height: float | None, name: str, style: str) -> None:
    if height is not None:
        axes.axhline(height, color="black", linestyle=style, linewidth=1.0)
        axes.text(
            0.99,
            height,
            name,
            fontsize=7,
            ha="right",
            va="center",
            transform=axes.get_yaxis_transform(),
            bbox={"color": "white", "alpha": 0.8, "pad": 0.8},
        )


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
