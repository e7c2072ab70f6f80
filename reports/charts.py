"""The curves of a run, with the numbers that share a chart, their units, and the way they are drawn."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter, StrMethodFormatter

from reports.evaluations import names_of, of_name

Record = dict[str, Any]

BLUE, ORANGE, GREEN, PURPLE = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#AA5C99",
)  # the colour-blind can tell them apart (Okabe and Ito)
MOST_POINTS = 800
"""A curve with more points is drawn as the means of at most this many blocks, because a chart is no more
pixels wide."""
SMOOTH_FROM = 80
"""A curve with at least this many points is drawn faint, with its running mean over 1/20 of the run on
top."""
FLATTENED = 4.0
"""Evaluations get an axis of their own on the right if they would stretch the left one to more than this many
times the range of the training curves."""
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
    """One key of metrics.jsonl. ``marked``: measured only now and then, so each point gets a marker.
    ``exact``: free of noise, so no mean is drawn."""

    key: str
    label: str
    color: str
    marked: bool = False
    exact: bool = False


@dataclass(frozen=True)
class Panel:
    """Curves that share axes. ``unit`` labels the y axis; ``share``: the numbers are in [0, 1] and shown as
    percentages; ``from_zero``: the y axis starts at 0; ``form`` formats the y axis' ticks."""

    title: str
    unit: str
    curves: tuple[Curve, ...]
    share: bool = False
    from_zero: bool = False
    form: str | None = None


PANELS = (
    Panel(
        "Loss",
        "loss per unit",
        (Curve("loss", "training", BLUE), Curve("eval_loss", "evaluation", ORANGE, True)),
    ),
    Panel(
        "Answers that are right",
        "share of held-out prompts",
        (
            Curve("eval_accuracy_sampled", "sampled", BLUE, True),
            Curve("eval_accuracy_greedy", "greedy", ORANGE, True),
        ),
        share=True,
    ),
    Panel(
        "Length of answers",
        "tokens",
        (Curve("eval_length_sampled", "", BLUE, True),),
    ),
    Panel(
        "KL from the initial weights, on their answers",
        "nats per token",
        (Curve("eval_kl_initial", "", GREEN, True),),
        from_zero=True,
    ),
    Panel(
        "Reward margin",
        "chosen − rejected, β·nats",
        (
            Curve("reward_margin", "training, against the current reference", BLUE),
            Curve("eval_reward_margin", "evaluation, against the initial weights", ORANGE, True),
        ),
    ),
    Panel(
        "Reward accuracy",
        "share of pairs",
        (
            Curve("reward_accuracy", "training", BLUE),
            Curve("eval_reward_accuracy", "evaluation", ORANGE, True),
        ),
        share=True,
    ),
    Panel(
        "Rewards in training",
        "β·nats",
        (Curve("reward_chosen", "chosen", BLUE), Curve("reward_rejected", "rejected", ORANGE)),
    ),
    Panel(
        "Drift of the log-probabilities",
        "nats per token",
        (
            Curve("kl", "from the current reference", BLUE),
            Curve("drift", "from the initial weights", GREEN),
            Curve("eval_drift", "from the initial weights, evaluation", ORANGE, True),
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
        from_zero=True,
    ),
    Panel(
        "Distance from the policy that sampled",
        "nats per token",
        (
            Curve("behavior_kl", "KL(μ‖policy)", BLUE),
            Curve("engine_gap", "mean log-ratio, policy against μ", ORANGE),
        ),
    ),
    Panel(
        "Correction for another policy's samples",
        "share, and mean weight",
        (
            Curve("effective_sample_size", "effective sample size", BLUE),
            Curve("correction_weight", "mean weight", ORANGE),
            Curve("correction_masked", "masked tokens", GREEN),
        ),
        from_zero=True,
    ),
    Panel(
        "Staleness of the samples",
        "steps since sampled",
        (Curve("staleness", "", PURPLE, exact=True),),
        from_zero=True,
    ),
    Panel(
        "Age of the reference",
        "step − reference_step",
        (Curve("reference_age", "", PURPLE, exact=True),),
        from_zero=True,
    ),
    Panel("Gradient norm", "before clipping", (Curve("grad_norm", "", BLUE),), from_zero=True),
    Panel("Learning rate", "per step", (Curve("lr", "", GREEN, exact=True),), from_zero=True, form="{x:.1e}"),
    Panel("Speed", "tokens/s", (Curve("tokens_per_second", "", PURPLE),), from_zero=True, form="{x:,.0f}"),
)


_NAMED = {
    "eval_loss": ("Loss on every evaluation set", "loss per unit", False),
    "eval_accuracy_sampled": ("Sampled answers that are right, on every set", "share of prompts", True),
    "eval_accuracy_greedy": ("Greedy answers that are right, on every set", "share of prompts", True),
    "eval_length_sampled": ("Length of answers, on every set", "tokens", False),
    "eval_reward_margin": ("Reward margin on every evaluation set", "chosen − rejected, β·nats", False),
    "eval_reward_accuracy": ("Reward accuracy on every evaluation set", "share of pairs", True),
    "eval_drift": ("Drift on every evaluation set", "nats per token", False),
}
_COLORS = (BLUE, ORANGE, GREEN, PURPLE, "#56B4E9", "#E69F00", "#000000")


def named_panels(records: Sequence[Record]) -> list[Panel]:
    """Return, for each measure, a panel with all named evaluation sets beside the run's own held-out set;
    none if there are no named sets."""
    names = names_of(dict.fromkeys(key for record in records for key in record))
    if not names:
        return []
    panels = []
    for key, (title, unit, share) in _NAMED.items():
        keys = [("held out", key), *((name, of_name(key, name)) for name in names)]
        curves = tuple(
            Curve(own, label, _COLORS[i % len(_COLORS)], True) for i, (label, own) in enumerate(keys)
        )
        panels.append(Panel(title, unit, curves, share))
    return panels


def points(records: Sequence[Record], key: str) -> tuple[np.ndarray, np.ndarray]:
    """Return (steps, values) of the lines that have ``key``; null becomes NaN, a gap in the curve. Both are
    empty if no value is finite."""
    if key == "reference_age":
        pairs = [
            (r["step"], r["step"] - r["reference_step"])
            for r in records
            if r.get("reference_step") is not None
        ]
    else:
        pairs = [(r["step"], np.nan if r[key] is None else r[key]) for r in records if key in r]
    steps, values = np.array(pairs, dtype=float).reshape(-1, 2).T
    return (steps, values) if np.isfinite(values).any() else (steps[:0], values[:0])


def running_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Return the mean of the finite values within ``window`` (odd) around each point; NaN where there are
    none."""
    finite, ones = np.isfinite(values), np.ones(window)
    total = np.convolve(np.where(finite, values, 0.0), ones, mode="same")
    count = np.convolve(finite.astype(float), ones, mode="same")
    return np.divide(total, count, out=np.full(len(values), np.nan), where=count > 0)


def thinned(values: np.ndarray, most: int) -> np.ndarray:
    """Return at most ``most`` values: means of blocks of equal length, without NaN values."""
    if len(values) <= most:
        return values
    block = -(-len(values) // most)
    blocks = np.pad(values, (0, -len(values) % block), constant_values=np.nan).reshape(-1, block)
    finite = np.isfinite(blocks)
    count = finite.sum(axis=1)
    return np.divide(
        np.where(finite, blocks, 0.0).sum(axis=1), count, out=np.full(len(blocks), np.nan), where=count > 0
    )


def draw(panel: Panel, records: Sequence[Record]) -> Figure | None:
    """Return the panel as a figure; None if no line has a number for it."""
    curves = [(curve, *points(records, curve.key)) for curve in panel.curves]
    curves = [c for c in curves if len(c[1])]
    if not curves:
        return None
    figure = Figure(figsize=(5.4, 2.9), layout="constrained")
    axes = figure.subplots()
    aside = _right_axis(axes, curves) if not panel.share and _flattened(curves) else axes
    for curve, steps, values in curves:
        _draw_curve(aside if curve.marked else axes, curve, steps, values)
    axes.set_title(panel.title)
    axes.set_xlabel("optimizer step")
    axes.set_ylabel(panel.unit)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True))
    axes.margins(y=0.12)
    if panel.form:
        axes.yaxis.set_major_formatter(StrMethodFormatter(panel.form))
    if panel.share:
        axes.yaxis.set_major_formatter(PercentFormatter(xmax=1.0))
        axes.set_ylim(max(axes.get_ylim()[0], -0.02), min(max(axes.get_ylim()[1], 1e-3), 1.02))
    if panel.from_zero:
        axes.set_ylim(bottom=0.0, top=max(axes.get_ylim()[1], 1e-12))
    put_legend(figure, *dict.fromkeys((axes, aside)))
    return figure


Drawn = list[tuple[Curve, np.ndarray, np.ndarray]]
"""Curves with their steps and values."""


def _flattened(curves: Drawn) -> bool:
    """Whether evaluations would flatten the curves of training if they shared an axis."""
    training = [values for curve, _, values in curves if not curve.marked]
    if len(training) == len(curves) or not training or min(map(len, training)) <= FEW_POINTS:
        return False
    taken, needed = _span(training), _span([values for _, _, values in curves])
    return needed > FLATTENED * taken > 0


def _span(arrays: list[np.ndarray]) -> float:
    """Return the distance between the lowest and the highest of all values."""
    values = np.concatenate(arrays)
    return float(np.nanmax(values) - np.nanmin(values))


def _right_axis(axes: Axes, curves: Drawn) -> Axes:
    """Return an axis on the right in the colour of the evaluations drawn on it."""
    color = next(curve.color for curve, *_ in curves if curve.marked)
    right = axes.twinx()
    right.spines["right"].set_visible(True)
    right.spines["right"].set_color(color)
    right.tick_params(axis="y", colors=color)
    right.set_ylabel("evaluation", color=color)
    right.grid(False)
    right.margins(y=0.12)
    return right


LINE = 74
"""Characters that fit in a line of the legend under a chart; each label takes its length and ``MARK`` more
for its line mark."""
MARK = 8


def put_legend(figure: Figure, *axes: Axes) -> None:
    """Put the curves' names below the chart, where no curve runs; nothing if no curve has a name."""
    legends = [each.get_legend_handles_labels() for each in axes]
    handles, labels = ([item for part in parts for item in part] for parts in zip(*legends, strict=True))
    if labels:
        columns = max(1, LINE // (max(map(len, labels)) + MARK))
        figure.legend(handles, labels, loc="outside lower center", ncols=min(columns, len(labels)))


def _draw_curve(axes: Axes, curve: Curve, steps: np.ndarray, values: np.ndarray) -> None:
    if curve.marked:
        axes.plot(
            steps,
            values,
            color=curve.color,
            label=curve.label,
            marker="o",
            markersize=4,
            linewidth=1.4,
            zorder=3,
        )
        return
    smooth = len(values) >= SMOOTH_FROM and not curve.exact
    x, y = (steps, values) if curve.exact else (thinned(steps, MOST_POINTS), thinned(values, MOST_POINTS))
    axes.plot(
        x,
        y,
        color=curve.color,
        linewidth=0.9 if smooth else 1.4,
        alpha=0.3 if smooth else 1.0,
        label=None if smooth else curve.label,
        marker="." if len(values) <= FEW_POINTS else None,
    )
    if smooth:
        mean = running_mean(values, 2 * (len(values) // 40) + 1)
        axes.plot(x, thinned(mean, MOST_POINTS), color=curve.color, linewidth=1.6, label=curve.label)


def charts(records: Sequence[Record], panels: Sequence[Panel] | None = None) -> list[tuple[str, bytes]]:
    """Return (title, SVG) of each panel that has something to show. Without ``panels``: the panels of a run,
    then those of its named evaluation sets."""
    if panels is None:
        panels = [*PANELS, *named_panels(records)]
    with matplotlib.rc_context(STYLE):
        return [(panel.title, svg(figure)) for panel in panels if (figure := draw(panel, records))]


def svg(figure: Figure, **saved: Any) -> bytes:
    """Return the figure as SVG, with the same bytes whenever it is drawn. ``saved``: see ``savefig``."""
    out = io.BytesIO()
    figure.savefig(out, format="svg", metadata={"Date": None}, **saved)
    return out.getvalue()
