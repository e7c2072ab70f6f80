"""The report's figures, drawn like the paper's, as means with 95 % confidence intervals over seeds and every
seed as a dot."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from launch.pictures import STYLE
from reports import charts
from reports.statistics import mean
from study.claims import by_cell, interval
from study.plan import Plan
from study.records import Record

RED, BLUE, ORANGE, PURPLE, GREY, GREEN = "#C0392B", "#0072B2", "#E69F00", "#AA5C99", "#888888", "#009E73"
VARIANTS = (
    ("offline", "offline", RED),
    ("online", "online", BLUE),
    ("offline-hl", "offline+humanline", ORANGE),
    ("online-hl", "online+humanline", PURPLE),
)
LOSSES = ("dpo", "kto", "grpo")
SAMPLED, GREEDY = "eval_accuracy_sampled", "eval_accuracy_greedy"
KL = "eval_kl_initial"
Values = Mapping[str, Mapping[int, float]]
Bar = tuple[str, str, str]
"""(cell, label, colour)"""


def figures(records: Sequence[Record]) -> dict[str, tuple[str, Figure]]:
    """Return file stem -> (caption, figure), of every figure that has runs."""
    sampled, greedy = by_cell(records, SAMPLED), by_cell(records, GREEDY)
    start = mean(
        [r.before[SAMPLED] for r in records if not r.cell.startswith("tune-") and SAMPLED in r.before]
    )
    base = start.value if start else None
    drawn = of_the_paper(records, sampled, greedy, base) | of_our_own(records, sampled, greedy, base)
    return {stem: (caption, figure) for stem, (caption, figure) in drawn.items() if figure is not None}


def of_the_paper(
    records: Sequence[Record], sampled: Values, greedy: Values, base: float | None
) -> dict[str, tuple[str, Figure | None]]:
    """Return the paper's own figures. ``base``: the sampled accuracy from which all runs start."""
    return {
        "figure1": (
            "Figure 1: the four variants of each loss, at equal numbers of examples. Above sampled accuracy "
            "(temperature 0.7), "
            "below greedy. Dashed: the model that all start from.",
            twelve(sampled, greedy, base),
        ),
        "figure5": (
            "Figure 5: humanline's parts, each alone; where it was run, clipping against sampling (right).",
            side_by_side(sampled, base, {"parts": parts_alone, "clipping or sampling": clipping_or_sampling}),
        ),
        "figure6": (
            "Figure 6: offline+humanline on quarters of the data, by mean token log-probability under the "
            "initial weights, lowest "
            "first (80 steps each).",
            quarters(sampled, base),
        ),
        "figure7": (
            "Figure 7: GRPO on verified answers, sampled every step or every 64 steps.",
            curves(records),
        ),
        "figure8": (
            "Figure 8: how often the reference is synced; lines: plain offline and online.",
            frequencies(sampled, sync_freqs(records)),
        ),
        "figure10": (
            "Figure 10: humanline syncing before the update, trust-region syncing after it.",
            side_by_side(sampled, base, {"": humanline_or_trust_region}),
        ),
    }


def of_our_own(
    records: Sequence[Record], sampled: Values, greedy: Values, base: float | None
) -> dict[str, tuple[str, Figure | None]]:
    """Return figures of the runs' cost, and of a table and a control of the paper."""
    return {
        "figure11": (
            "Figure 11: what a run takes, CPU seconds on one core, by what they go to.",
            times(records),
        ),
        "table6": ("Table 6: humanline DPO with other clipping ranges.", ranges(sampled)),
        "controls": (
            "Controls: plain offline GRPO with wider clips; sampled and greedy accuracy.",
            controls(sampled, greedy, base),
        ),
    }


def parts_alone(loss: str) -> list[Bar]:
    return [
        (f"{loss}-offline-hl", "both", ORANGE),
        (f"{loss}-sync-only", "syncing only", GREEN),
        (f"{loss}-clip-only", "clipping only", PURPLE),
        (f"{loss}-offline", "neither (offline)", RED),
        (f"{loss}-online", "online", BLUE),
    ]


def clipping_or_sampling(loss: str) -> list[Bar]:
    return [(f"{loss}-offline-hl", "clipping", ORANGE), (f"{loss}-hl-sample", "sampling", GREEN)]


def humanline_or_trust_region(loss: str) -> list[Bar]:
    return [
        (f"{loss}-offline-hl", "humanline, k = 16", ORANGE),
        (f"{loss}-trust-16", "trust region, every 16", GREEN),
        (f"{loss}-trust-64", "trust region, every 64", PURPLE),
        (f"{loss}-offline", "offline", RED),
    ]


def svg(figure: Figure) -> bytes:
    """Return the figure as SVG; the same runs give the same bytes."""
    with rc_context(STYLE):
        return charts.svg(figure, bbox_inches="tight")


def canvas(columns: int, width: float, height: float, rows: int = 1, **keywords: Any) -> tuple[Figure, Any]:
    with rc_context(STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        return figure, figure.subplots(rows, columns, squeeze=False, **keywords)


def bars(axes: Axes, values: Values, groups: Sequence[tuple[str, Sequence[Bar]]], base: float | None) -> bool:
    """Draw groups of bars; a cell without runs leaves its place empty. Return whether any cell had runs."""
    seen: dict[str, str] = {}
    found = False
    for g, (_, cells) in enumerate(groups):
        for i, (cell, label, color) in enumerate(cells):
            width = 0.8 / len(cells)
            x = g - 0.4 + (i + 0.5) * width
            seen.setdefault(label, color)
            points = list(values.get(cell, {}).values())
            middle = mean(points)
            if middle is None:
                continue
            found = True
            axes.bar(x, middle.value, width * 0.9, color=color, alpha=0.75)
            whisker(axes, x, points)
            axes.plot([x] * len(points), points, ".", color="black", markersize=3, alpha=0.5)
    for label, color in seen.items():
        axes.bar(0, 0, 0, color=color, alpha=0.75, label=label)
    if base is not None:
        axes.axhline(base, color=GREY, linestyle="--", linewidth=1)
    axes.set_xticks(range(len(groups)), [name for name, _ in groups])
    axes.set_ylim(0, 1.02)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.grid(axis="x", visible=False)
    return found


def whisker(axes: Axes, x: float, points: Sequence[float]) -> None:
    middle = mean(list(points))
    if middle is not None and middle.error is not None:
        low, high = interval(middle)
        axes.errorbar(
            x,
            middle.value,
            [[middle.value - low], [high - middle.value]],
            color="black",
            capsize=2.5,
            linewidth=1,
        )


def twelve(sampled: Values, greedy: Values, base: float | None) -> Figure | None:
    figure, axes = canvas(1, 7, 5, rows=2)
    groups = [
        (loss.upper(), [(f"{loss}-{v}", label, color) for v, label, color in VARIANTS]) for loss in LOSSES
    ]
    found = bars(axes[0][0], sampled, groups, base)
    bars(axes[1][0], greedy, groups, None)
    axes[0][0].set_ylabel("sampled accuracy")
    axes[1][0].set_ylabel("greedy accuracy")
    axes[0][0].legend(ncols=4, fontsize=7.5, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    return figure if found else None


def side_by_side(values: Values, base: float | None, panels: Mapping[str, Any]) -> Figure | None:
    """Draw panels of bars by loss, those of which cells were run; ``panels``: title -> (loss -> its bars)."""
    main = {f"{loss}-{v}" for loss in LOSSES for v, _, _ in VARIANTS}
    drawn = {
        title: cells
        for title, cells in panels.items()
        if any(cell in values for loss in LOSSES for cell, _, _ in cells(loss) if cell not in main)
    }
    if not drawn:
        return None
    figure, axes = canvas(len(drawn), 4.2 * len(drawn) + (2 if len(drawn) == 1 else 0), 3.2)
    for ax, (title, cells) in zip(axes[0], drawn.items(), strict=True):
        bars(ax, values, [(loss.upper(), cells(loss)) for loss in LOSSES], base)
        ax.set_title(title)
        ax.legend(fontsize=7, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.1))
    axes[0][0].set_ylabel("sampled accuracy")
    return figure


def dots(values: Values, cells: Sequence[str], measure: str) -> Figure:
    """Draw a line for each cell with its seeds, their mean and its interval."""
    figure, axes = canvas(1, 6, 0.8 + 0.28 * len(cells))
    ax = axes[0][0]
    for y, cell in enumerate(reversed(cells)):
        points = list(values.get(cell, {}).values())
        middle = mean(points)
        if middle is None:
            continue
        ax.plot(points, [y] * len(points), ".", color=GREY, markersize=4)
        ax.plot(middle.value, y, "o", color=ORANGE if "hl" in cell else BLUE, markersize=5)
        if middle.error is not None:
            low, high = interval(middle)
            ax.plot([low, high], [y, y], color="black", linewidth=1)
    ax.set_yticks(range(len(cells)), list(reversed(cells)))
    ax.set_xlabel(measure)
    ax.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=1))
    return figure


def quarters(values: Values, base: float | None) -> Figure | None:
    shades = ("#fdd49e", "#fdbb84", "#fc8d59", "#d7301f")
    names = ("lowest", "second", "third", "highest")
    groups = [
        (f"{loss.upper()}+humanline", [(f"{loss}-hl-q{i + 1}", names[i], shades[i]) for i in range(4)])
        for loss in ("dpo", "grpo")
    ]
    figure, axes = canvas(1, 5, 3)
    found = bars(axes[0][0], values, groups, base)
    axes[0][0].legend(ncols=4, fontsize=7.5, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    axes[0][0].set_ylabel("sampled accuracy")
    return figure if found else None


def curves(records: Sequence[Record]) -> Figure | None:
    """Draw accuracy over examples of the rare-sampling runs: mean and 95 % interval over seeds."""
    styles = {
        "rare-online": ("online: every step", BLUE),
        "rare-64x": ("every 64 steps", RED),
        "rare-64x-hl-k16": ("… humanline, k = 16", GREEN),
        "rare-64x-hl-k4": ("… humanline, k = 4", ORANGE),
        "rare-64x-hl-k1": ("… humanline, k = 1", PURPLE),
    }
    figure, axes = canvas(1, 5.5, 3.4)
    ax, found = axes[0][0], False
    for cell, (label, color) in styles.items():
        by_x: dict[int, list[float]] = {}
        for record in (r for r in records if r.cell == cell):
            for x, y in [*record.curve, (record.examples, record.after[SAMPLED])]:
                by_x.setdefault(x, []).append(y)
        xs = sorted(by_x)
        middles = [mean(by_x[x]) for x in xs]
        if not xs:
            continue
        found = True
        ends = [interval(m) if m and m.error is not None else (m.value if m else 0.0,) * 2 for m in middles]
        ax.plot(xs, [m.value for m in middles if m], "o-", color=color, label=label, markersize=3)
        ax.fill_between(
            xs, [low for low, _ in ends], [high for _, high in ends], color=color, alpha=0.15, linewidth=0
        )
    ax.set_xlabel("sequences trained on")
    ax.set_ylabel("sampled accuracy")
    ax.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    if found:
        ax.legend(fontsize=7.5)
    return figure if found else None


def sync_freqs(records: Sequence[Record]) -> dict[str, int]:
    """Return cell -> k, of offline+humanline and of the cells that differ from it in k, by their names."""
    cells = {r.cell: r.command for r in records if re.fullmatch(r"\w+-(offline-)?hl(-k\d+)?", r.cell)}
    return {
        cell: int(word.partition("=")[2])
        for cell, words in cells.items()
        for word in words
        if word.startswith("sync_freq=")
    }


def frequencies(values: Values, sync_freq: Mapping[str, int]) -> Figure | None:
    """Draw a panel for each loss. ``sync_freq``: cell -> k, steps."""
    figure, axes = canvas(3, 8, 2.8, sharey=True)
    found = False
    ticks = sorted(set(sync_freq.values()))
    for ax, loss in zip(axes[0], LOSSES, strict=True):
        cells = sorted((k, cell) for cell, k in sync_freq.items() if cell.startswith(f"{loss}-"))
        here = {k: list(values[cell].values()) for k, cell in cells if cell in values}
        found |= len(here) > 1
        ax.plot(
            list(here),
            [sum(points) / len(points) for points in here.values()],
            "o-",
            color=ORANGE,
            label="offline+humanline",
        )
        for k, points in here.items():
            whisker(ax, k, points)
        for variant, label, color in VARIANTS[:2]:
            if middle := mean(list(values.get(f"{loss}-{variant}", {}).values())):
                ax.axhline(middle.value, color=color, linestyle="--", linewidth=1.2, label=label)
        ax.set_xscale("log", base=2)
        ax.set_xticks(ticks, [str(k) for k in ticks])
        ax.set_xlabel("k, steps between syncs")
        ax.set_title(loss.upper())
        ax.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes[0][0].set_ylabel("sampled accuracy")
    axes[0][0].legend(fontsize=7)
    return figure if found else None


def times(records: Sequence[Record]) -> Figure | None:
    variants = ("offline", "hl-k1", "offline-hl", "offline-hl-k1", "online", "online-hl")
    cells = [f"{loss}-{variant}" for loss in LOSSES for variant in variants]
    parts = (
        ("train", "steps (syncing included)", ORANGE),
        ("sample", "sampling and scoring", BLUE),
        ("rest", "loading, reference scores, evaluation, report", "#cccccc"),
    )
    cells = [cell for cell in cells if any(r.cell == cell for r in records)]
    figure, axes = canvas(1, 6.5, 4)
    ax, found = axes[0][0], False
    for y, cell in enumerate(reversed(cells)):
        own = [r for r in records if r.cell == cell]
        left = 0.0
        for key, _, color in parts:
            found = True
            seconds = [part_seconds(r)[key] for r in own]
            ax.barh(y, sum(seconds) / len(seconds), left=left, color=color, height=0.7)
            left += sum(seconds) / len(seconds)
    for _, label, color in parts:
        ax.barh(0, 0, 0, color=color, label=label)
    ax.set_yticks(range(len(cells)), [cell.replace("-k1", ", k = 1") for cell in reversed(cells)])
    ax.set_xlabel("CPU seconds a run")
    ax.grid(axis="y", visible=False)
    ax.legend(fontsize=7, ncols=3, loc="upper center", bbox_to_anchor=(0.4, -0.14))
    return figure if found else None


def part_seconds(record: Record) -> dict[str, float]:
    """Return a run's CPU seconds by stage. Steps and sampling are timed by wall clock; if runs shared cores,
    their wall time is scaled to the CPU time that the run got."""
    share = min(1.0, record.seconds["cpu"] / record.seconds["wall"])
    train, sample = record.seconds["train"] * share, record.seconds["sample"] * share
    return {
        "train": train,
        "sample": sample,
        "rest": max(0.0, record.seconds["cpu"] - train - sample),
        "all": record.seconds["cpu"],
    }


def ranges(values: Values) -> Figure | None:
    cells = (
        ("dpo-clip-2.0-1.5", "[−2.0, 1.5]"),
        ("dpo-offline-hl", "[−1.5, 1.5]"),
        ("dpo-clip-1.0-1.5", "[−1.0, 1.5]"),
        ("dpo-clip-1.0-2.0", "[−1.0, 2.0]"),
        ("dpo-clip-1.0-3.0", "[−1.0, 3.0]"),
    )
    figure, axes = canvas(1, 5, 2.8)
    ax = axes[0][0]
    here = [(label, list(values[cell].values())) for cell, label in cells if cell in values]
    for x, (_, points) in enumerate(here):
        ax.plot([x] * len(points), points, ".", color=GREY, markersize=4)
        ax.plot(x, sum(points) / len(points), "o", color=ORANGE)
        whisker(ax, x, points)
    ax.set_xticks(range(len(here)), [label for label, _ in here])
    ax.set_xlabel("range of a token's log-ratio, nats")
    ax.set_ylabel("sampled accuracy")
    ax.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    return figure if len(here) > 1 else None


def controls(sampled: Values, greedy: Values, base: float | None) -> Figure | None:
    cells: list[Bar] = [
        ("grpo-offline", "offline", RED),
        ("grpo-offline-eps1", "offline, ε 1", "#e07b6f"),
        ("grpo-offline-eps4", "offline, ε 4", "#f0b8b0"),
        ("grpo-trust-16", "trust region, every 16", GREEN),
        ("grpo-offline-hl", "offline+humanline", ORANGE),
        ("grpo-online", "online", BLUE),
    ]
    figure, axes = canvas(2, 7.5, 3.2, sharey=True)
    found = "grpo-offline-eps1" in sampled
    bars(axes[0][0], sampled, [("sampled", cells)], base)
    bars(axes[0][1], greedy, [("greedy", cells)], None)
    figure.legend(*axes[0][0].get_legend_handles_labels(), fontsize=7, ncols=3, loc="outside upper center")
    axes[0][0].set_ylabel("accuracy")
    return figure if found else None


def frontier(plan: Plan, records: Sequence[Record]) -> Figure | None:
    """Draw the measure against the distance from the start, a panel for each loss: small dots for the runs of
    tuning, a large one for the mean of each main cell."""
    losses = list(dict.fromkeys(plan.losses.values()))
    colors = {variant: color for variant, _, color in VARIANTS}
    further = iter((GREEN, GREY, "#56B4E9", "#F0E442"))
    figure, axes = canvas(len(losses), 3.4 * len(losses), 3.4, sharey=True)
    found = False
    for ax, loss in zip(axes[0], losses, strict=True):
        for cell in (cell for cell in plan.main if plan.losses[cell] == loss):
            variant = cell.removeprefix(f"{loss}-")
            color = colors.get(variant) or colors.setdefault(variant, next(further, GREY))
            tried = points(r for r in records if r.cell.startswith(f"tune-{cell}-lr"))
            ended = points(r for r in records if r.cell == cell)
            ax.plot([x for x, _ in tried], [y for _, y in tried], ".", color=color, markersize=4, alpha=0.5)
            if ended:
                middle = [fmean(column) for column in zip(*ended, strict=True)]
                ax.plot(*middle, "o", color=color, markersize=8, markeredgecolor="black", markeredgewidth=0.6)
            ax.plot([], [], "o", color=color, label=variant)
            found |= bool(tried or ended)
        ax.set_title(loss.upper())
        ax.set_xscale("symlog", linthresh=0.01)
        ax.set_xlim(left=0)
        ax.set_xlabel("KL from the start, nats a token")
        ax.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes[0][0].set_ylabel(plan.measure)
    figure.legend(*axes[0][0].get_legend_handles_labels(), fontsize=7.5, ncols=6, loc="outside upper center")
    return figure if found else None


def points(runs: Iterable[Record]) -> list[tuple[float, float]]:
    """Return (KL from the start, the measure) of the runs that have both."""
    return [(run.after[KL], run.after[SAMPLED]) for run in runs if KL in run.after and SAMPLED in run.after]
