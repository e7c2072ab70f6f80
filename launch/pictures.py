"""The results as a page: the tables, a chart of the cells side by side, and a learning curve per cell."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from launch.cells import Cell
from launch.collect import FINISHED, Result
from reports.statistics import mean

BLUE, GREY = "#0072B2", "#888888"
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "axes.axisbelow": True,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "legend.frameon": False,
    "svg.fonttype": "path",
    "svg.hashsalt": "humanline",  # the same runs give the same bytes
}
WORDS = {
    "eval_accuracy_sampled": "sampled accuracy",
    "eval_accuracy_greedy": "greedy accuracy",
    "eval_loss": "evaluation loss",
    "eval_reward_margin": "evaluation margin, β·nats",
    "eval_reward_accuracy": "evaluation reward accuracy",
    "eval_drift": "drift from start, nats/token",
    "eval_kl_initial": "KL from start, nats/token",
    "eval_retained_sampled": "second task, sampled accuracy",
    "eval_retained_greedy": "second task, greedy accuracy",
}


def write_html(
    path: Path,
    name: str,
    notes: Sequence[str],
    failed: Sequence[Result],
    table: Sequence[Sequence[str]],
    tests: Sequence[Sequence[str]],
    cells: Sequence[Cell],
    metric: str,
) -> None:
    """One self-contained page."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True
    )
    with rc_context(STYLE):
        overview = svg(bars(cells, metric))
        curves = [
            (cell.name, cell.progress, svg(curve(cell, metric, limits(cells, metric)))) for cell in cells
        ]
    page = environment.get_template("results.html.j2").render(
        name=name,
        notes=notes,
        failed=failed,
        table=table,
        tests=tests,
        overview=overview,
        curves=curves,
        metric=WORDS.get(metric, metric),
    )
    path.write_text(page, encoding="utf-8")


def svg(figure: Figure) -> str:
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None}, bbox_inches="tight")
    text = out.getvalue()
    return text[text.index("<svg") :]


def bars(cells: Sequence[Cell], metric: str) -> Figure:
    """Mean and standard error of each cell, every seed as a dot; cells without a finished run keep their
    line, empty."""
    figure = Figure(figsize=(7, 0.6 + 0.32 * len(cells)))
    axes = figure.subplots()
    for row, cell in enumerate(cells):
        values = list(cell.values(metric).values())
        if (middle := mean(values)) is not None:
            axes.plot(
                values, [row] * len(values), "o", color=BLUE, alpha=0.3, markersize=4, markeredgewidth=0
            )
            axes.errorbar(
                middle.value, row, xerr=middle.error or 0, fmt="o", color=BLUE, capsize=3, markersize=6
            )
        else:
            axes.annotate(
                "no finished run", (0.02, row), xycoords=("axes fraction", "data"), va="center", color=GREY
            )
    axes.set_yticks(range(len(cells)), [cell.name for cell in cells])
    axes.set_ylim(len(cells) - 0.5, -0.5)
    axes.set_xlabel(f"{WORDS.get(metric, metric)} (mean ± standard error over seeds; dots are seeds)")
    return figure


def curve(cell: Cell, metric: str, span: tuple[float, float] | None) -> Figure:
    """Held-out metric over training examples beside the training loss: seeds thin (dashed: unfinished), their
    mean thick."""
    figure = Figure(figsize=(7, 2.2))
    left, right = figure.subplots(1, 2, gridspec_kw={"wspace": 0.3})
    drawn = metric if span is not None else "eval_loss"
    draw(left, cell.chosen, drawn, marked=True)
    if span is not None:
        left.set_ylim(*span)
    draw(right, cell.chosen, "loss", marked=False)
    left.set_title(WORDS.get(drawn, drawn))
    right.set_title("training loss")
    for axes in (left, right):
        axes.set_xlabel("training examples")
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    return figure


def draw(axes: Axes, runs: Sequence[Result], key: str, marked: bool) -> None:
    at: dict[int, list[float]] = {}
    for run in runs:
        points = points_of(run, key)
        for x, y in points:
            at.setdefault(x, []).append(y)
        axes.plot(
            *zip(*points, strict=True) if points else ([], []),
            color=GREY,
            alpha=0.6,
            linewidth=0.8,
            linestyle="-" if run.status == FINISHED else "--",
            marker="." if marked else "",
        )
    most = max(map(len, at.values()), default=0)
    means = [
        (x, mean(ys)) for x, ys in sorted(at.items()) if len(ys) == most
    ]  # where all seeds are: else a mean jumps as one ends
    if most > 1:
        xs, ms = [x for x, _ in means], [m for _, m in means if m is not None]
        axes.plot(xs, [m.value for m in ms], color=BLUE, linewidth=1.8, marker="." if marked else "")
        low, high = [m.value - (m.error or 0) for m in ms], [m.value + (m.error or 0) for m in ms]
        axes.fill_between(xs, low, high, color=BLUE, alpha=0.2, linewidth=0)


def points_of(run: Result, key: str) -> list[tuple[int, float]]:
    """(examples trained on before the measurement, value). A line tells of the weights before its step, its
    own batch not counted."""
    points, before = [], 0
    for line in run.lines:
        if line.get(key) is not None:
            points.append((before, float(line[key])))
        before = int(line.get("examples", before))
    return points


def limits(cells: Sequence[Cell], metric: str) -> tuple[float, float] | None:
    """The y axis that all learning curves share; None where no run has a curve of the metric."""
    values = [y for cell in cells for run in cell.chosen for _, y in points_of(run, metric)]
    if not values:
        return None
    margin = 0.06 * (max(values) - min(values)) or 0.5
    return min(values) - margin, max(values) + margin
