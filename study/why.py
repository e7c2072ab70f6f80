"""Figures and tables about the mechanism behind the results, to be read beside the claims; none of it is
tested.

They show how far chosen and rejected answers moved, what that cost in distance from the start, how long
answers became, what was clipped, how much an example still weighs, and how tuning depended on the anchor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean

from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from scipy import stats

from config.defaults import section
from launch.grid import Settings
from reports.statistics import mean
from study.figures import GREEN, GREY, SAMPLED, VARIANTS, canvas, whisker
from study.pages import Section
from study.plan import FULL, Plan
from study.records import Record
from study.tuning import Tuned

Drawn = dict[str, tuple[str, Figure | None]]
COLORS = {variant: color for variant, _, color in VARIANTS}
OTHERS = (GREEN, GREY, "#56B4E9", "#F0E442")
"""Colours of further variants, in their order."""
KL, CHOSEN, REJECTED = "eval_kl_initial", "eval_reward_chosen", "eval_reward_rejected"
WHY = ("moves", "displacement", "frontier", "anchor", "share")
"""The figures of the section on mechanisms, in their order; ``share`` is also the figure of its
experiment."""
FEWEST = 10
"""Fewest runs for a meaningful correlation."""
LENGTH, OWN = "eval_length_sampled", "data.instruct.own_share"


def why_figures(
    plan: Plan, records: Sequence[Record], chosen: Mapping[str, Settings], tuned: Tuned | None
) -> dict[str, tuple[str, Figure]]:
    """Return file stem -> (caption, figure), of those that have numbers."""
    final = [record for record in records if not record.cell.startswith("tune-")]
    drawn: Drawn = {
        "moves": (
            "How far held-out chosen and rejected answers moved from the start, nats a sequence: means over "
            "seeds of the log-ratio against the initial weights.",
            moves(plan, final, chosen),
        ),
        "displacement": (
            f"Each final run of each loss: {plan.measure} against how far held-out chosen answers moved; ρ "
            "is the rank correlation, of offline and of online runs. Grey: further cells.",
            displacement(plan, final, chosen),
        ),
        "frontier": (
            f"What a distance from the start buys: {plan.measure} against KL(start || policy), nats a token. "
            "Small: runs of tuning, on validation prompts; large: means of the main cells.",
            frontier(plan, records),
        ),
        "anchor": (
            f"{plan.measure} on validation prompts by the {plan.then_name}, as a multiple of what it is "
            "before tuning, at each cell's best learning rate: means over tuning's seeds.",
            anchors(plan, tuned),
        ),
        "share": (
            "Left: offline training by the share of prompts that the model answered itself; mean, 95 % "
            "interval. Right: what humanline adds, by how unlikely the initial model finds the chosen "
            "answers.",
            shares(plan, final),
        ),
    }
    return {stem: (caption, figure) for stem, (caption, figure) in drawn.items() if figure is not None}


def why_sections(
    plan: Plan, final: Sequence[Record], chosen: Mapping[str, Settings], captions: Mapping[str, str]
) -> list[Section]:
    """Return the sections on the other measurements of the main cells."""
    text = (
        "For reading beside the claims; nothing is tested here. *Moved*: the mean log-ratio of held-out "
        "chosen and rejected answers against the initial weights, nats a sequence. *KL*: of the trained "
        "policy from the initial one on the latter's answers, nats a token. *Length*: tokens of sampled "
        "answers, before and after. *Weight of an example*: of DPO, σ(−margin) at the mean margin of the "
        "last tenth of the steps, against the reference of each; where the reference is the policy itself it "
        "is 1/2 throughout, and no example counts as learnt.",
    )
    stems = [stem for stem in WHY if stem in captions and stem not in plan.cells(FULL)]
    shown = [(stem, captions[stem]) for stem in stems]
    table = why_table(plan, final, chosen)
    if len(table) == 1:
        return []
    return [
        Section("Why: what else was measured", text, table, shown[0] if shown else None),
        *(Section("", (), None, figure) for figure in shown[1:]),
    ]


def why_table(plan: Plan, records: Sequence[Record], chosen: Mapping[str, Settings]) -> list[list[str]]:
    """Return a row for each main cell that has runs."""
    rows = [
        [
            "cell",
            plan.measure,
            "chosen moved",
            "rejected moved",
            "KL from start",
            "length",
            "tokens clipped",
            "weight of an example",
        ]
    ]
    for cell, runs in of_cells(plan, records):
        scale = reward_scale(plan, cell, chosen)
        high, low = (average(run.after.get(key) for run in runs) for key in (CHOSEN, REJECTED))
        lengths = [average(getattr(run, end).get(LENGTH) for run in runs) for end in ("before", "after")]
        rows.append(
            [
                cell,
                form(average(run.after.get(SAMPLED) for run in runs), "{:.1%}"),
                form(None if high is None else high / scale, "{:+.1f}"),
                form(None if low is None else low / scale, "{:+.1f}"),
                form(average(run.after.get(KL) for run in runs), "{:.3f}"),
                " → ".join(form(n, "{:.1f}") for n in lengths) if None not in lengths else "–",
                form(average(run.clipped for run in runs), "{:.2%}"),
                form(average(map(example_weight, runs)) if plan.losses[cell] == "dpo" else None, "{:.2f}"),
            ]
        )
    return rows


def of_cells(plan: Plan, records: Sequence[Record]) -> list[tuple[str, list[Record]]]:
    """Return the main cells that have runs, with their runs."""
    found = [(cell, [record for record in records if record.cell == cell]) for cell in plan.main]
    return [(cell, runs) for cell, runs in found if runs]


def reward_scale(plan: Plan, cell: str, chosen: Mapping[str, Settings]) -> float:
    """Return the factor from a log-ratio in nats to the evaluation's reward: beta, except for GRPO, whose
    beta has another meaning and whose factor is 1."""
    parent = plan.parent(cell)
    if plan.losses[parent] == "grpo":
        return 1.0
    settings = plan.settings(cell, chosen.get(parent))
    return float(settings.get("loss.beta", section(f"loss/{plan.losses[parent]}.yaml:loss")["beta"]))


def example_weight(run: Record) -> float | None:
    """Return the weight of an example in DPO's loss at the end, sigmoid(-margin), at the mean margin of the
    last tenth of the steps against each step's reference. If the reference is the policy itself, the weight
    is 1/2: no example counts as learnt."""
    margin = run.traces.get("reward_margin")
    return None if margin is None else 1 / (1 + math.exp(margin))


def average(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def form(value: float | None, how: str) -> str:
    return "–" if value is None else how.format(value)


def color_of(plan: Plan, cell: str) -> str:
    """Return the colour of a cell's variant."""
    cells = by_loss(plan)[plan.losses[cell]]
    further = [other for other in cells if variant_of(plan, other) not in COLORS]
    return COLORS.get(variant_of(plan, cell)) or OTHERS[further.index(cell) % len(OTHERS)]


def variant_of(plan: Plan, cell: str) -> str:
    return cell.removeprefix(f"{plan.losses[cell]}-")


def by_loss(plan: Plan) -> dict[str, list[str]]:
    """Loss -> its main cells."""
    return {
        loss: [cell for cell in plan.main if plan.losses[cell] == loss]
        for loss in dict.fromkeys(plan.losses.values())
    }


def moves(plan: Plan, final: Sequence[Record], chosen: Mapping[str, Settings]) -> Figure | None:
    """Draw two bars a cell."""
    cells = [(cell, runs) for cell, runs in of_cells(plan, final) if any(CHOSEN in run.after for run in runs)]
    if not cells:
        return None
    figure, axes = canvas(1, 6.5, 0.9 + 0.3 * len(cells))
    ax = axes[0][0]
    for y, (cell, runs) in enumerate(reversed(cells)):
        for key, offset, color in ((CHOSEN, 0.18, "#0072B2"), (REJECTED, -0.18, "#C0392B")):
            moved = average(run.after.get(key) for run in runs)
            if moved is not None:
                ax.barh(y + offset, moved / reward_scale(plan, cell, chosen), height=0.34, color=color)
    for label, color in (("chosen", "#0072B2"), ("rejected", "#C0392B")):
        ax.barh(0, 0, 0, color=color, label=label)
    ax.axvline(0, color="black", linewidth=0.8)
    ax.set_yticks(range(len(cells)), [cell for cell, _ in reversed(cells)])
    ax.set_xlabel("nats a sequence")
    ax.grid(axis="y", visible=False)
    ax.legend(fontsize=7.5, ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    return figure


def displacement(plan: Plan, final: Sequence[Record], chosen: Mapping[str, Settings]) -> Figure | None:
    """Draw a panel for each loss, with a dot for each run of its main cells and of the cells that are like
    them."""
    losses = by_loss(plan)
    places: dict[str, list[tuple[Record, float, float]]] = {loss: [] for loss in losses}
    for run in final:
        if CHOSEN in run.after and SAMPLED in run.after:
            moved = run.after[CHOSEN] / reward_scale(plan, run.cell, chosen)
            places[plan.losses[plan.parent(run.cell)]].append((run, moved, run.after[SAMPLED]))
    if not any(places.values()):
        return None
    figure, axes = canvas(len(losses), 3.4 * len(losses), 3.4, sharey=True)
    for ax, (loss, cells) in zip(axes[0], losses.items(), strict=True):
        for run, x, y in places[loss]:
            main = run.cell in cells
            ax.plot(x, y, ".", color=color_of(plan, run.cell) if main else GREY, alpha=0.9 if main else 0.4)
        for cell in cells:
            ax.plot([], [], ".", color=color_of(plan, cell), label=variant_of(plan, cell))
        ax.set_title(", ".join([loss.upper(), *correlations(plan, places[loss])]), fontsize=9)
        ax.set_xlabel("chosen moved, nats a sequence")
        ax.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes[0][0].set_ylabel(plan.measure)
    figure.legend(*axes[0][0].get_legend_handles_labels(), fontsize=7.5, ncols=6, loc="outside upper center")
    return figure


def correlations(plan: Plan, places: Sequence[tuple[Record, float, float]]) -> list[str]:
    """Return Spearman's rho of the offline and of the online runs, if there are at least ten."""
    told = []
    for name in ("offline", "online"):
        pairs = [
            (x, y)
            for run, x, y in places
            if bool(plan.settings(run.cell).get("online")) == (name == "online")
        ]
        if len(pairs) >= FEWEST:
            told.append(f"ρ {stats.spearmanr(*zip(*pairs, strict=True)).statistic:+.2f} {name}")
    return told


def frontier(plan: Plan, records: Sequence[Record]) -> Figure | None:
    """Draw a panel for each loss."""
    losses = by_loss(plan)
    figure, axes = canvas(len(losses), 3.4 * len(losses), 3.4, sharey=True)
    found = False
    for ax, (loss, cells) in zip(axes[0], losses.items(), strict=True):
        for cell in cells:
            color = color_of(plan, cell)
            tried = points(r for r in records if r.cell.startswith(f"tune-{cell}-lr"))
            ended = points(r for r in records if r.cell == cell)
            ax.plot([x for x, _ in tried], [y for _, y in tried], ".", color=color, markersize=4, alpha=0.5)
            if ended:
                middle = [fmean(column) for column in zip(*ended, strict=True)]
                ax.plot(*middle, "o", color=color, markersize=8, markeredgecolor="black", markeredgewidth=0.6)
            ax.plot([], [], "o", color=color, label=variant_of(plan, cell))
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


def anchors(plan: Plan, tuned: Tuned | None) -> Figure | None:
    """Draw a panel for each loss with a line for each of its cells."""
    if tuned is None or not tuned.then:
        return None
    losses = by_loss(plan)
    figure, axes = canvas(len(losses), 3.2 * len(losses), 3.2, sharey=True)
    for ax, (loss, cells) in zip(axes[0], losses.items(), strict=True):
        for cell in cells:
            grid = tuned.then.get(cell, {})
            tried = sorted(grid)
            factors = [value / plan.then[cell][1] for value in tried]
            color, label = color_of(plan, cell), variant_of(plan, cell)
            ax.plot(factors, [fmean(grid[v]) for v in tried], "o-", color=color, markersize=3, label=label)
        ax.set_title(loss.upper())
        ax.set_xscale("log", base=2)
        ax.set_xlabel(f"{plan.then_name}, × what it is before tuning")
        ax.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes[0][0].set_ylabel(plan.measure)
    figure.legend(*axes[0][0].get_legend_handles_labels(), fontsize=7.5, ncols=6, loc="outside upper center")
    return figure


def shares(plan: Plan, final: Sequence[Record]) -> Figure | None:
    """Draw the ``share`` experiment, plain and with humanline, by the share of the model's own answers."""
    cells = plan.cells(FULL).get("share", [])
    if not any(record.cell in cells for record in final):
        return None
    parents = list(dict.fromkeys(plan.parent(cell) for cell in cells))
    lines = {
        parent: {0.0: parent} | {float(plan.settings(c)[OWN]): c for c in cells if plan.parent(c) == parent}
        for parent in parents
    }
    figure, axes = canvas(2, 8, 3.2)
    left, right = axes[0]
    for parent, line in lines.items():
        here = {x: [r.after[SAMPLED] for r in final if r.cell == cell] for x, cell in sorted(line.items())}
        here = {x: values for x, values in here.items() if values}
        color = color_of(plan, parent)
        left.plot(list(here), [fmean(values) for values in here.values()], "o-", color=color, label=parent)
        for x, values in here.items():
            whisker(left, x, values)
    left.set_xlabel("share of prompts answered by the model itself")
    left.set_ylabel(plan.measure)
    left.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    left.legend(fontsize=7.5)
    plain, moved = parents[0], parents[-1]
    for x, cell in sorted(lines[plain].items()):
        gains = gained(final, cell, lines[moved].get(x, ""))
        unlikely = average(r.before.get("train_logprob_chosen") for r in final if r.cell == cell)
        if gains and unlikely is not None and (middle := mean(gains)):
            place = (-unlikely, 100 * middle.value)
            right.plot(*place, "o", color="black")
            right.annotate(f"{x:.0%}", place, textcoords="offset points", xytext=(5, 4))
    right.axhline(0, color=GREY, linewidth=0.8)
    right.set_xlabel("nats a token of the chosen answers under the initial weights")
    right.set_ylabel(f"{moved} − {plain}, points")
    return figure


def gained(final: Sequence[Record], plain: str, moved: str) -> list[float]:
    """Return ``moved`` - ``plain``, by seed."""
    values = [{r.seed: r.after[SAMPLED] for r in final if r.cell == cell} for cell in (plain, moved)]
    return [values[1][seed] - values[0][seed] for seed in sorted(values[0].keys() & values[1].keys())]
