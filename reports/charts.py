"""The figures of a run's report, which are curves of metrics.jsonl, with the numbers that share a chart and
their units, and those of diagnostics.jsonl (docs/diagnostics.md)."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

Record = dict[str, Any]

# the colour-blind can tell them apart (Okabe and Ito)
BLUE, ORANGE, GREEN, PURPLE = "#0072B2", "#D55E00", "#009E73", "#AA5C99"
MOST_POINTS = 200
"""A curve with more points is drawn as the means of at most this many blocks."""
FEW_POINTS = 30
"""Up to this many points, each one gets a marker."""
STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#888888",
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "axes.axisbelow": True,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "svg.fonttype": "path",
    "svg.hashsalt": "humanline",  # the same run gives the same bytes
}


@dataclass(frozen=True)
class Curve:
    """One key of metrics.jsonl."""

    key: str
    label: str
    color: str


@dataclass(frozen=True)
class Panel:
    """Curves that share axes. ``unit`` labels the y axis; ``share``: the numbers are in [0, 1] and shown as
    percentages; ``log``: the y axis is logarithmic."""

    title: str
    unit: str
    curves: tuple[Curve, ...]
    share: bool = False
    log: bool = False


def _both(key: str, training: str = "training", evaluation: str = "evaluation") -> tuple[Curve, Curve]:
    return Curve(key, training, BLUE), Curve(f"eval_{key}", evaluation, ORANGE)


PANELS = (
    Panel("Loss", "loss per unit", _both("loss")),
    Panel(
        "Answers that are right",
        "share of held-out prompts",
        (
            Curve("eval_accuracy_sampled", "sampled", BLUE),
            Curve("eval_accuracy_greedy", "greedy", ORANGE),
        ),
        share=True,
    ),
    Panel(
        "Reward margin",
        "chosen − rejected, β·nats",
        _both("reward_margin", "training, current reference", "evaluation, initial weights"),
    ),
    Panel("Reward accuracy", "share of pairs", _both("reward_accuracy"), share=True),
    Panel(
        "Drift of the log-probabilities",
        "nats per token",
        (
            Curve("kl", "from the current reference", BLUE),
            Curve("drift", "from the initial weights", GREEN),
            Curve("eval_drift", "from the initial weights, evaluation", ORANGE),
        ),
    ),
    Panel(
        "Clipped tokens",
        "share of completion tokens",
        (
            Curve("clipped_low", "below log_epsilon_P", BLUE),
            Curve("clipped_high", "above log_epsilon_R", ORANGE),
        ),
        share=True,
    ),
)


def points(records: Sequence[Record], key: str) -> tuple[np.ndarray, np.ndarray]:
    """Return (steps, values) of the lines that have ``key``; null becomes NaN, a gap in the curve. Both are
    empty if no value is finite."""
    pairs = [(r["step"], np.nan if r[key] is None else r[key]) for r in records if key in r]
    steps, values = np.array(pairs, dtype=float).reshape(-1, 2).T
    return (steps, values) if np.isfinite(values).any() else (steps[:0], values[:0])


def thinned(values: np.ndarray, most: int) -> np.ndarray:
    """Return at most ``most`` values: means of about equal blocks, without NaN values."""
    blocks = np.array_split(values, min(most, len(values)))
    finite = [block[np.isfinite(block)] for block in blocks]
    return np.array([block.mean() if len(block) else np.nan for block in finite])


def is_drawn(panel: Panel, records: Sequence[Record]) -> bool:
    """Return whether a curve of the panel has two numbers: one alone is no curve."""
    return any(np.isfinite(points(records, curve.key)[1]).sum() > 1 for curve in panel.curves)


def draw(panel: Panel, records: Sequence[Record]) -> Figure | None:
    """Return the panel as a figure; None if no curve of it has two numbers."""
    if not is_drawn(panel, records):
        return None
    figure = Figure(figsize=(5.4, 2.9), layout="constrained")
    axes = figure.subplots()
    axes.set(title=panel.title, xlabel="optimizer step", ylabel=panel.unit)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True))
    for curve in panel.curves:
        steps, values = points(records, curve.key)
        if len(steps):
            axes.plot(
                thinned(steps, MOST_POINTS),
                thinned(values, MOST_POINTS),
                color=curve.color,
                label=curve.label,
                linewidth=1.4,
                marker="." if len(steps) <= FEW_POINTS else None,
            )
    axes.margins(y=0.12)
    if panel.share:
        axes.yaxis.set_major_formatter(PercentFormatter(xmax=1.0))
        axes.set_ylim(max(axes.get_ylim()[0], -0.02), min(max(axes.get_ylim()[1], 1e-3), 1.02))
    if panel.log:
        axes.set_yscale("log")
    longest = max(len(curve.label) for curve in panel.curves)
    figure.legend(loc="outside lower center", ncols=1 if longest > 28 else 2)  # where no curve runs
    return figure


def charts(records: Sequence[Record], panels: Sequence[Panel] = PANELS) -> list[tuple[str, bytes]]:
    """Return (title, SVG) of each panel that is drawn."""
    with matplotlib.rc_context(STYLE):
        return [(panel.title, svg(figure)) for panel in panels if (figure := draw(panel, records))]


def svg(figure: Figure, **saved: Any) -> bytes:
    """Return the figure as SVG, with the same bytes whenever it is drawn. ``saved``: see ``savefig``."""
    out = io.BytesIO()
    figure.savefig(out, format="svg", metadata={"Date": None}, **saved)
    return out.getvalue()


# -- diagnostics -----------------------------------------------------------------------------------

COLORS = {"chosen": BLUE, "rejected": ORANGE, "neutral": PURPLE}
DIAGNOSTIC_PANELS = (
    Panel(
        "Spread of the log-ratios",
        "nats, root mean square",
        tuple(Curve(f"spread_{side}", side, color) for side, color in COLORS.items()),
        log=True,
    ),
    Panel(
        "Drift from the initial weights",
        "nats per token",
        (Curve("drift_chosen", "chosen", BLUE), Curve("drift_rejected", "rejected", ORANGE)),
    ),
    Panel("Entropy of the policy", "nats per token", (Curve("entropy", "held-out completions", GREEN),)),
)


def diagnostic_charts(lines: Sequence[Record]) -> list[tuple[str, bytes]]:
    """Return (title, SVG) of the figures; none if the file lacks its first line or has no interval."""
    if len(lines) < 2 or "edges" not in lines[0]:
        return []
    first, intervals = lines[0], lines[1:]
    numbers = [{"step": 0, "entropy": first["entropy"]}, *map(flattened, intervals)]
    return charts(numbers, DIAGNOSTIC_PANELS)


def flattened(line: Record) -> Record:
    """Return an interval as a line of metrics: ``spread_chosen``, ``drift_chosen`` …, and the entropy at its
    end."""
    numbers = {"step": line["step"] + 1, "entropy": line["entropy"]}
    for side in COLORS:
        if side in line:
            numbers[f"spread_{side}"] = line[side]["spread"] or None  # 0 has no logarithm
            numbers[f"drift_{side}"] = line[side]["drift"]
    return numbers
