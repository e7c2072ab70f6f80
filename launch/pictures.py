"""The results as a page, with the tables, the cells side by side, and learning curves of each cell with its
seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import jinja2
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from common.files import write_whole
from config.schema_data import named_measure
from launch.collect import Cell, Result
from reports import charts
from reports.evaluations import MEASURES
from reports.outcome import FINISHED
from reports.statistics import SeedMean, mean

BLUE, GREY = "#0072B2", "#888888"
COLORS = (BLUE, "#E69F00", "#009E73", "#C0392B", "#AA5C99", "#56B4E9", "#7F5539", "#444444")
GAP = {"wspace": 0.3}
MOST_CURVES = 60
STYLE = charts.STYLE | {"axes.titlesize": 10, "axes.titleweight": "normal", "legend.fontsize": "medium"}
WORDS = {key: label for key, label, _ in MEASURES}


def in_words(metric: str) -> str:
    """Return a metric's label for an axis; the label of a named evaluation set's metric includes the set's
    name."""
    named = named_measure(metric)
    if named is None:
        return WORDS.get(metric, metric)
    name, measure = named
    return f"{name}: {WORDS.get(f'eval_{measure}', measure)}"


def write_html(
    path: Path,
    cells: Sequence[Cell],
    metric: str,
    frontier: Figure | None,
    parts: Mapping[str, object],
) -> None:
    """Write one self-contained page, and beside it overview.svg, its first picture. ``parts``: what
    results.html.j2 shows as it is. With more than ``MOST_CURVES`` cells, no curves are drawn."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True
    )
    few = cells if len(cells) <= MOST_CURVES else []
    span = limits(few, metric)
    with rc_context(STYLE):
        overview = svg(bars(cells, metric))
        drawn = {
            "overview": overview,
            "reached": svg(frontier),
            "curves": [(cell.name, cell.progress, svg(curve(cell, metric, span))) for cell in few],
        }
    write_whole(path.with_name("overview.svg"), overview)
    write_whole(path, environment.get_template("results.html.j2").render({**parts, **drawn}))


def svg(figure: Figure | None) -> str:
    """Return the figure as an element of a page; "" without one."""
    text = "" if figure is None else charts.svg(figure, bbox_inches="tight").decode()
    return text[text.index("<svg") :] if text else text


def bars(cells: Sequence[Cell], metric: str) -> Figure:
    """Draw the mean and standard error of each cell with every seed as a dot; a cell without a finished run
    keeps its line, with a note."""
    figure = Figure(figsize=(7, 0.6 + 0.32 * len(cells)))
    axes = figure.subplots()
    axes.set_yticks(range(len(cells)), [cell.name for cell in cells])
    axes.set_ylim(len(cells) - 0.5, -0.5)
    axes.set_xlabel(f"{in_words(metric)} (mean ± standard error over seeds; dots are seeds)")
    for row, cell in enumerate(cells):
        values = list(cell.values(metric).values())
        if (middle := mean(values)) is None:
            at = axes.get_yaxis_transform()
            axes.text(0.02, row, "no finished run", transform=at, va="center", color=GREY)
            continue
        axes.plot(values, [row] * len(values), "o", color=BLUE, alpha=0.3, markersize=4, markeredgewidth=0)
        axes.errorbar(middle.value, row, xerr=middle.error or 0, fmt="o", color=BLUE, capsize=3, markersize=6)
    return figure


def curve(cell: Cell, metric: str, span: tuple[float, float] | None) -> Figure | None:
    """Draw the held-out metric over training examples beside the training loss: seeds thin (dashed:
    unfinished), their mean thick; a single seed thick. If one of the two has no numbers, the other is drawn
    alone; None if neither has any."""
    held_out = metric if span is not None else "eval_loss"
    keys = [key for key in (held_out, "loss") if any(points_of(run, key) for run in cell.chosen)]
    if not keys:
        return None
    figure = Figure(figsize=(3.5 * len(keys), 2.2))
    for axes, key in zip(figure.subplots(1, len(keys), squeeze=False, gridspec_kw=GAP)[0], keys, strict=True):
        draw(axes, cell.chosen, key, marked=key == held_out)
        if key == metric and span is not None:
            axes.set_ylim(*span)
        axes.set_title("training loss" if key == "loss" else in_words(key))
        axes.set_xlabel("training examples")
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    return figure


def mean_curve(runs: Sequence[Result], key: str) -> list[tuple[int, SeedMean]]:
    """Return (examples, mean over seeds) at the points with the largest number of seeds; elsewhere the mean
    would jump as a seed ends."""
    at: dict[int, list[float]] = {}
    for run in runs:
        for x, y in points_of(run, key):
            at.setdefault(x, []).append(y)
    most = max(map(len, at.values()), default=0)
    points = [(x, mean(ys)) for x, ys in sorted(at.items()) if len(ys) == most]
    return [(x, middle) for x, middle in points if middle is not None]


def draw(axes: Axes, runs: Sequence[Result], key: str, marked: bool) -> None:
    begun = [(run, points) for run in runs if (points := points_of(run, key))]
    mark = "." if marked else ""
    color, alpha, width = (BLUE, 1.0, 1.8) if len(begun) == 1 else (GREY, 0.6, 0.8)
    for run, points in begun:
        stroke = "-" if run.status == FINISHED else "--"
        axes.plot(*zip(*points, strict=True), stroke, color=color, alpha=alpha, linewidth=width, marker=mark)
    if len(begun) > 1:
        xs, means = zip(*mean_curve(runs, key), strict=True)
        axes.plot(xs, [m.value for m in means], color=BLUE, linewidth=1.8, marker=mark)
        low, high = ([m.value + side * (m.error or 0) for m in means] for side in (-1, 1))
        axes.fill_between(xs, low, high, color=BLUE, alpha=0.2, linewidth=0)


def points_of(run: Result, key: str) -> list[tuple[int, float]]:
    """Return (examples trained on before the measurement, value). A line measures the weights before its
    step, so its own batch is not counted."""
    points, before = [], 0
    for line in run.lines:
        if line.get(key) is not None:
            points.append((before, float(line[key])))
        before = int(line.get("examples", before))
    return points


def limits(cells: Sequence[Cell], metric: str) -> tuple[float, float] | None:
    """Return the y limits that all learning curves share; None if no run has a curve of the metric."""
    values = [y for cell in cells for run in cell.chosen for _, y in points_of(run, metric)]
    if not values:
        return None
    margin = 0.06 * (max(values) - min(values)) or 0.5
    return min(values) - margin, max(values) + margin
