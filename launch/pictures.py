"""The results as a page, with the tables, the cells side by side, and learning curves of all cells together
and of each with its seeds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import jinja2
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from common.files import write_whole
from config.schema_evaluations import named_measure
from launch.cells import Cell
from launch.collect import Result
from reports import charts
from reports.outcome import FINISHED
from reports.statistics import Comparison, SeedMean, mean

BLUE, GREY = "#0072B2", "#888888"
COLORS = (BLUE, "#E69F00", "#009E73", "#C0392B", "#AA5C99", "#56B4E9", "#7F5539", "#444444")
STROKES = ("-", "--", ":")
GAP = {"wspace": 0.3}
MOST_CURVES = 60
STYLE = charts.STYLE | {"axes.titlesize": 10, "axes.titleweight": "normal", "legend.fontsize": "medium"}
WORDS = {
    "eval_accuracy_sampled": "sampled accuracy",
    "eval_accuracy_greedy": "greedy accuracy",
    "eval_length_sampled": "answer length, tokens",
    "eval_loss": "evaluation loss",
    "eval_reward_margin": "evaluation margin, β·nats",
    "eval_reward_accuracy": "evaluation reward accuracy",
    "eval_drift": "drift from start, nats/token",
    "eval_kl_initial": "KL from start, nats/token",
}


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
    name: str,
    notes: Sequence[str],
    failed: Sequence[Result],
    table: Sequence[Sequence[str]],
    tests: Sequence[Sequence[str]],
    cells: Sequence[Cell],
    metric: str,
    crossed: tuple[Sequence[Sequence[str]], Sequence[Comparison]] = ((), ()),
    powers: Sequence[Sequence[str]] = (),
    frontier: Figure | None = None,
    planned: tuple[str, Sequence[Sequence[str]]] = ("", ()),
) -> None:
    """Write one self-contained page. ``crossed``: for a crossed sweep, the means of its axes' values, or its
    arms, and their effects. ``powers``: what the tests could see. ``planned``: a note and
    the table of the tests that the sweep file plans. With more than ``MOST_CURVES`` cells, no
    curves are drawn."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True
    )
    with rc_context(STYLE):
        means, effects = crossed
        overview = svg(forest(effects, metric) if effects else bars(cells, metric))
        few = cells if len(cells) <= MOST_CURVES else []
        together = overlay(few, metric)
        drawn = [(cell, curve(cell, metric, limits(few, metric))) for cell in few]
        curves = [
            (cell.name, cell.progress, None if figure is None else svg(figure)) for cell, figure in drawn
        ]
        overlaid = None if together is None else svg(together)
        reached = None if frontier is None else svg(frontier)
    page = environment.get_template("results.html.j2").render(
        name=name,
        notes=notes,
        failed=failed,
        table=table,
        tests=tests,
        planned=planned,
        means=means,
        powers=powers,
        reached=reached,
        overview=overview,
        overlaid=overlaid,
        curves=curves,
        metric=in_words(metric),
    )
    write_whole(path, page)


def svg(figure: Figure) -> str:
    text = charts.svg(figure, bbox_inches="tight").decode()
    return text[text.index("<svg") :]


def bars(cells: Sequence[Cell], metric: str) -> Figure:
    """Draw the mean and standard error of each cell with every seed as a dot; a cell without a finished run
    keeps its line, with a note."""
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
    axes.set_xlabel(f"{in_words(metric)} (mean ± standard error over seeds; dots are seeds)")
    return figure


def forest(effects: Sequence[Comparison], metric: str) -> Figure:
    """Draw the difference and standard error of each effect; significant ones are filled."""
    figure = Figure(figsize=(7, 0.7 + 0.24 * len(effects)))
    axes = figure.subplots()
    axes.axvline(0, color=GREY, linewidth=0.8)
    for row, effect in enumerate(effects):
        axes.errorbar(
            effect.difference.value,
            row,
            xerr=effect.difference.error or 0,
            fmt="o",
            color=BLUE,
            markerfacecolor=BLUE if effect.significant else "white",
            capsize=2,
            markersize=5,
        )
    axes.set_yticks(range(len(effects)), [f"{effect.b} − {effect.a}" for effect in effects])
    axes.set_ylim(len(effects) - 0.5, -0.5)
    axes.set_xlabel(f"change of {in_words(metric)} (± standard error over seeds; filled: significant)")
    return figure


def overlay(cells: Sequence[Cell], metric: str) -> Figure | None:
    """Draw the mean curve of every cell for the held-out metric, or for the evaluation loss if no run has a
    curve of the metric; None if fewer than two cells have a curve."""
    key = metric if limits(cells, metric) is not None else "eval_loss"
    lines = [(cell.name, mean_curve(cell.chosen, key)) for cell in cells]
    lines = [(name, line) for name, line in lines if len(line) > 1]
    if len(lines) < 2:
        return None
    figure = Figure(figsize=(7, 3.2 + 0.16 * len(lines)))
    axes = figure.subplots()
    for i, (name, line) in enumerate(lines):
        style = STROKES[i // len(COLORS) % len(STROKES)]
        xs, ys = [x for x, _ in line], [y.value for _, y in line]
        axes.plot(xs, ys, style, color=COLORS[i % len(COLORS)], marker=".", linewidth=1.4, label=name)
    axes.set_xlabel("training examples")
    axes.set_ylabel(in_words(key))
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    columns = 2 if len(lines) > 3 else 1
    axes.legend(fontsize=7, ncols=columns, loc="upper center", bbox_to_anchor=(0.5, -0.18))
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
    alone = len(begun) == 1
    for run, points in begun:
        axes.plot(
            *zip(*points, strict=True),
            color=BLUE if alone else GREY,
            alpha=1.0 if alone else 0.6,
            linewidth=1.8 if alone else 0.8,
            linestyle="-" if run.status == FINISHED else "--",
            marker="." if marked else "",
        )
    if not alone:
        means = mean_curve(runs, key)
        xs, ms = [x for x, _ in means], [m for _, m in means]
        axes.plot(xs, [m.value for m in ms], color=BLUE, linewidth=1.8, marker="." if marked else "")
        low, high = [m.value - (m.error or 0) for m in ms], [m.value + (m.error or 0) for m in ms]
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
