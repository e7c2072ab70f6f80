"""The figures about samples that another policy wrote, from diagnostics.jsonl (docs/off-policy.md)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from reports.charts import BLUE, GREEN, ORANGE, Record, svg
from reports.metrics import COLUMNS

TITLES = {"positions": "by position", "ages": "by staleness"}
AXES = {"positions": "position in the completion", "ages": "steps since sampled"}


def behavior_charts(intervals: Sequence[Record]) -> list[tuple[str, bytes]]:
    """Return (title, SVG) of each figure over the whole run; a figure is left out if no token has a known
    mu."""
    tallies = [line["behavior"] for line in intervals if "behavior" in line]
    drawn = []
    for name, suffix in TITLES.items():
        sums = total([part[name] for part in tallies])
        if sums["known"].sum() > 0:
            title = f"Samples and policy, {suffix}"
            drawn.append((title, svg(figure(title, name, sums))))
    return drawn


def total(parts: Sequence[Sequence[Sequence[float | None]]]) -> dict[str, np.ndarray]:
    """Return column -> its sums by bin over all intervals; NaN if an interval's sum is not finite."""
    out = np.zeros((max(map(len, parts), default=0), len(COLUMNS)))
    for part in parts:
        out[: len(part)] += np.array(part, float).reshape(-1, len(COLUMNS))
    return dict(zip(COLUMNS, out.T, strict=True))


def figure(title: str, name: str, sums: dict[str, np.ndarray]) -> Figure:
    """Draw KL(mu || policy) and the effective sample size of policy / mu in each bin. If a correction weighs
    tokens, also draw the effective sample size of its weights and the share of tokens that it masks."""
    weighed = bool((sums["weight"] != sums["tokens"]).any())
    shown = np.flatnonzero(sums["known"])
    made = Figure(figsize=(5.4, 2.9), layout="constrained")
    left, right = made.subplots(1, 2)
    made.suptitle(title, fontsize=10.5, fontweight="bold", x=0.02, ha="left")
    with np.errstate(invalid="ignore", divide="ignore"):
        kl = sums["kl"] / sums["known"]
        sizes = {
            "policy / μ": (sums["ratio"] ** 2 / (sums["known"] * sums["ratio_squared"]), BLUE, "-"),
            "correction": (sums["weight"] ** 2 / (sums["tokens"] * sums["weight_squared"]), ORANGE, "-"),
            "masked tokens": (sums["masked"] / sums["tokens"], GREEN, "--"),
        }
    _draw(left, shown, kl, BLUE, "-", None)
    left.set_title("KL(μ‖policy), nats per token", fontsize=8.5, fontweight="normal")
    for label, (values, color, style) in list(sizes.items())[: 3 if weighed else 1]:
        _draw(right, shown, values, color, style, label)
    right.set_title(
        "effective sample size" + (", masked" if weighed else ""), fontsize=8.5, fontweight="normal"
    )
    right.yaxis.set_major_formatter(PercentFormatter(xmax=1.0))
    right.legend()
    for axes in (left, right):
        axes.set_ylim(bottom=0.0)
        axes.set_xlabel(AXES[name])
        _name_bins(axes, name, shown)
    return made


def _draw(
    axes: Axes, shown: np.ndarray, values: np.ndarray, color: str, style: str, label: str | None
) -> None:
    axes.plot(
        shown,
        values[shown],
        color=color,
        linestyle=style,
        marker="o",
        markersize=3.5,
        linewidth=1.4,
        label=label,
    )


def _name_bins(axes: Axes, name: str, shown: np.ndarray) -> None:
    first = 1 if name == "positions" else 0
    spans = [_span(k, first) for k in range(int(shown.max()) + 1)]
    axes.set_xticks(range(len(spans)), spans, rotation=30, fontsize=7)


def _span(k: int, first: int) -> str:
    """Return the bin's label: positions 1, 2–3, 4–7 …; ages 0, 1, 2–3 …"""
    if first == 0 and k == 0:
        return "0"
    power = k if first == 1 else k - 1
    low, high = 2**power, 2 ** (power + 1) - 1
    return str(low) if low == high else f"{low}–{high}"
