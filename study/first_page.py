"""The study's first page, with a figure in the form of the paper's Figure 1 for every task and a one-word
verdict on each of the claims about the main cells.

The files are ``<out>/figure1.svg`` and ``report.md``; each task's own report lies beside them, in its folder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from common.files import write_whole
from reports.statistics import mean
from study.claims import NOT_RUN, Answer, Findings
from study.figures import LOSSES, VARIANTS, bars, canvas, svg
from study.pages import Section, Table, as_markdown
from study.plan import MAIN

FIGURE = "figure1"
CAPTION = (
    "The four variants of each loss on both tasks, at equal numbers of examples: mean, 95 % interval and "
    "every seed. Offline, humanline syncs as often as in the paper on such tasks, every 16 steps on sums and "
    "every step on stories. Dashed: the model that all start from. The axes do not begin at 0."
)


def write_first_page(out: Path, found: Mapping[str, Findings]) -> str:
    """Write the page and return the text to print. ``found``: task -> the findings of its report."""
    out.mkdir(parents=True, exist_ok=True)
    figure = overview([one for one in found.values() if one.runs])
    if figure is not None:
        (out / f"{FIGURE}.svg").write_bytes(svg(figure))
    sections = [
        Section("", ("\n".join(told(task, one) for task, one in found.items()),)),
        Section(
            "Online, offline, humanline",
            (),
            variants_table(found),
            (FIGURE, CAPTION) if figure is not None else None,
        ),
        Section("The paper's claims", (key(found),), claims_table(found)),
    ]
    title = "The study: the paper's comparisons in miniature"
    write_whole(out / "report.md", as_markdown(title, sections))
    return f"The first page: {out}/report.md"


def told(task: str, found: Findings) -> str:
    if not found.runs:
        return f"- **{found.title}**: not run yet."
    return (
        f"- **{found.title}**: {found.runs} of {found.planned} planned runs; "
        f"[every claim, figure and run]({task}/report.md)."
    )


def key(found: Mapping[str, Findings]) -> str:
    margins = ", ".join(
        f"{100 * one.margin:g} points of {one.measure} ({task})" for task, one in found.items() if one.runs
    )
    return (
        "One word for each pair of cells, by its loss: *seen*, *not seen*, *reversed*, or *not run*. "
        "*Better* is decided by a paired t-test over seeds with Holm–Bonferroni over all tests of all tasks; "
        f"*not worse* and *the same* by a 95 % interval against {margins}. In brackets: the "
        "difference in points."
    )


def overview(found: Sequence[Findings]) -> Figure | None:
    """Draw a panel for each task; None without any runs."""
    if not found:
        return None
    figure, axes = canvas(len(found), 4.4 * len(found), 3.4)
    drawn = False
    for ax, one in zip(axes[0], found, strict=True):
        groups = [
            (loss.upper(), [(f"{loss}-{v}", label, color) for v, label, color in VARIANTS]) for loss in LOSSES
        ]
        drawn |= bars(ax, one.values, groups, one.base)
        values = [
            value
            for loss in LOSSES
            for v, *_ in VARIANTS
            for value in one.values.get(f"{loss}-{v}", {}).values()
        ]
        if values:  # start the axis where the differences become visible
            everything = [*values, *([] if one.base is None else [one.base])]
            room = max(0.02, 0.1 * (max(everything) - min(everything)))
            ax.set_ylim(max(0.0, min(everything) - room), min(1.02, max(everything) + room))
        ax.yaxis.set_major_formatter(PercentFormatter(1.0))
        ax.set_title(one.title, fontsize=9)
        ax.set_ylabel(one.measure)
    figure.legend(*axes[0][0].get_legend_handles_labels(), fontsize=7.5, ncols=4, loc="outside upper center")
    return figure if drawn else None


def variants_table(found: Mapping[str, Findings]) -> Table:
    """Return means over seeds, per cent."""
    rows = [["task", "loss", *(label for _, label, _ in VARIANTS)]]
    for task, one in found.items():
        for loss in LOSSES:
            middles = [mean(list(one.values.get(f"{loss}-{v}", {}).values())) for v, *_ in VARIANTS]
            rows.append(
                [task, loss.upper(), *("–" if m is None else f"{100 * m.value:.1f} ({m.n})" for m in middles)]
            )
    return rows


def claims_table(found: Mapping[str, Findings]) -> Table:
    """Return a row for each claim about the main cells, with a column for each task."""
    titles = list(
        dict.fromkeys(
            a.claim.title for one in found.values() for a in one.answers if a.claim.experiment == MAIN
        )
    )
    rows = [["claim", "the paper", *found]]
    for title in titles:
        of_task = [[a for a in one.answers if a.claim.title == title] for one in found.values()]
        claim = next(a.claim for answers in of_task for a in answers)
        rows.append([title, f"{claim.source}: {claim.paper}", *(words(answers) for answers in of_task)])
    return rows


def words(answers: Sequence[Answer]) -> str:
    """Return the verdicts on a claim, by loss."""
    if not answers:
        return "–"
    return "; ".join(
        f"{a.b.partition('-')[0].upper()} {a.verdict}"
        + ("" if a.difference is None or a.verdict == NOT_RUN else f" ({100 * a.difference.value:+.1f})")
        for a in answers
    )
