"""The study's report as markdown, with the figures as files and the runs behind every number.

The files are ``<out>/report.md``, ``figure*.svg`` and ``runs.jsonl``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median, stdev

from matplotlib.figure import Figure

from launch.grid import Settings
from launch.results import markdown
from reports.statistics import SIGNIFICANT, mean, paired_power
from study.claims import (
    CLAIMS,
    FEWEST_SEEDS,
    NOT_RUN,
    SEEN,
    Answer,
    Claim,
    Findings,
    answers,
    by_cell,
    interval,
    read_claims,
)
from study.figures import GREEDY, SAMPLED, Values, dots, figures, frontier, part_seconds, svg
from study.pages import Section, Table, as_markdown
from study.plan import MAIN, Plan
from study.records import Record, write_records
from study.tuning import Tuned

ACCURACY = "sampled accuracy"
"""The measure's name on the sums task, which other plans' reports replace with their own."""


@dataclass(frozen=True)
class Asked:
    """What a plan's claims ask of its records, before anything is written."""

    claims: tuple[Claim, ...]
    margin: float
    metric: str
    values: Values
    greedy: Values

    def answers(self, others: Sequence[float] = ()) -> list[Answer]:
        """``others``: p-values of the other tasks' tests, which are corrected together with these."""
        return answers(self.claims, self.values, self.margin, self.greedy, others)


def ask(plan: Plan, mode: str, records: Sequence[Record], claims: Path = CLAIMS) -> Asked:
    """Return the plan's claims and the values that answer them. ``claims``: their file; the default file if
    it does not exist."""
    asked, margin, metric = read_claims(claims if claims.is_file() else CLAIMS)
    cells = {cell for part in plan.cells(mode).values() for cell in part}
    final = results(records)
    return Asked(
        tuple(claim for claim in (one.about(cells) for one in asked) if claim.pairs),
        margin,
        metric,
        by_cell(final, metric),
        by_cell(final, GREEDY),
    )


def results(records: Sequence[Record]) -> list[Record]:
    """Return the runs that are results, not tuning."""
    return [record for record in records if not record.cell.startswith("tune-")]


def write_report(
    plan: Plan,
    mode: str,
    chosen: Mapping[str, Settings],
    records: Sequence[Record],
    planned: int,
    out: Path,
    command: str,
    *,
    claims: Path = CLAIMS,
    tuned: Tuned | None = None,
    others: Sequence[float] = (),
) -> Findings:
    """Write the report and return its findings. ``tuned``: None if the runs behind ``chosen`` are not known.
    ``claims``, ``others``: see ``ask`` and ``Asked.answers``."""
    out.mkdir(parents=True, exist_ok=True)
    asked = ask(plan, mode, records, claims)
    final, margin, values = results(records), asked.margin, asked.values
    found = asked.answers(others)
    drawn = all_figures(plan, mode, records, values)
    for stem, (_, figure) in drawn.items():
        (out / f"{stem}.svg").write_bytes(svg(figure))
    captions = {stem: caption for stem, (caption, _) in drawn.items()}
    sections = [
        *opening(plan, records, planned, command),
        *claim_sections(plan, found, margin, len(others)),
        *cell_sections(plan, mode, final, captions),
        *tuning_sections(plan, chosen, tuned),
        origins(final, plan.measure),
    ]
    title = f"The study: {plan.title}"
    (out / "report.md").write_text(as_markdown(title, sections), encoding="utf-8")
    write_records(out / "runs.jsonl", records)
    counts = {
        word: sum(a.verdict == word for a in found) for word in ("seen", "not seen", "reversed", "not run")
    }
    told = ", ".join(f"{n} {word}" for word, n in counts.items() if n)
    where = f"Written to {out}/: report.md, runs.jsonl"
    start = mean([record.before[asked.metric] for record in final if asked.metric in record.before])
    return Findings(
        f"{markdown(claims_table(found, plan.main))}\n\n{told}; {len(records)} of {planned} runs. {where}",
        plan.title,
        plan.measure,
        tuple(found),
        values,
        start.value if start else None,
        margin,
        len(records),
        planned,
    )


def all_figures(
    plan: Plan, mode: str, records: Sequence[Record], values: Values
) -> dict[str, tuple[str, Figure]]:
    """Return file stem -> (caption, figure): the paper's figures, the distance from the start, and a plain
    one for each other experiment. ``values``: the metric of the final runs, by cell and seed."""
    plain = {
        name: (f"{title_of(name)}: mean, 95 % interval and every seed.", dots(values, cells, plan.measure))
        for name, cells in plan.cells(mode).items()
        if name not in FIGURES_OF and any(cell in values for cell in cells)
    }
    drawn = figures(results(records)) | plain
    distances = frontier(plan, records)
    if distances is not None:
        drawn["frontier"] = (
            f"{plan.measure.capitalize()} against KL(start || policy). Small: runs of tuning, on validation "
            "prompts; large: means of the main cells.",
            distances,
        )
    for _, figure in drawn.values():
        for ax in figure.axes:  # the paper's figures were first written for the sums task
            ax.set_ylabel(ax.get_ylabel().replace(ACCURACY, plan.measure))
            ax.set_xlabel(ax.get_xlabel().replace(ACCURACY, plan.measure))
    return {
        stem: (caption.replace(ACCURACY, plan.measure), figure) for stem, (caption, figure) in drawn.items()
    }


# -- sections --------------------------------------------------------------------------------------


def opening(plan: Plan, records: Sequence[Record], planned: int, command: str) -> list[Section]:
    final = results(records)
    start = {key: mean([r.before[key] for r in final if key in r.before]) for key in (SAMPLED, GREEDY)}
    begun = "; ".join(
        f"{key.removeprefix('eval_accuracy_')} {100 * value.value:.1f} %"
        for key, value in start.items()
        if value
    )
    cpu = sum(record.seconds["cpu"] for record in records) / 3600
    cells = {record.cell for record in final}
    tuned = len(cells & set(plan.main))
    return [
        Section(
            "What this is",
            (
                f"{plan.about.strip()} Where every run starts: {begun or 'not known'}.",
                f"Made by `{command}`: {len(records)} of {planned} planned runs are in it, "
                f"{cpu:.1f} CPU hours: {len(records) - len(final)} runs of tuning "
                f"({len(plan.tuning_seeds)} seeds each), and {len(final)} results. Of the {len(cells)} cells "
                f"with results {tuned} were tuned; the others have the settings of the cell that they "
                "change, and are marked (untuned). Each line of `runs.jsonl` is a run: `python train.py` "
                f"with its `command` and `idle_settings=note` repeats it. {made_at(records)}",
                "**Read it with care.** One task, one tiny model: what is seen here shows that the "
                "implementation does what it says and that an effect exists at this scale; what is not seen "
                "here says nothing about 8 billion parameters. Seeds change the order of the data, which "
                "half of the pairs is trained on, and what is sampled; all runs start from the same weights, "
                "so intervals understate what another model or data set would give.",
            ),
        )
    ]


def made_at(records: Sequence[Record]) -> str:
    """Return which commits of this project the runs were made with."""
    counts = Counter(record.commit for record in records)
    told = [
        f"{n} at {'no noted commit' if commit is None else f'`{commit[:12]}{commit[40:]}`'}"
        for commit, n in counts.most_common()
    ]
    machines = Counter(tuple(record.machine.items()) for record in records if record.machine)
    on = [f"{n} on " + ", ".join(f"{k} {v}" for k, v in machine) for machine, n in machines.most_common()]
    return f"Made with: {', '.join([*told, *on])}."


def claim_sections(plan: Plan, found: Sequence[Answer], margin: float, others: int) -> list[Section]:
    """Return the claims and the guesses about those not seen. ``others``: the number of tests of other tasks
    in the same family."""
    tests = sum(a.p_holm is not None for a in found)
    shared = f" and the {others} of the other task" if others else ""
    text = (
        f"Differences are in points of {plan.measure}, with 95 % intervals over seeds, paired by seed. "
        f"*Better* is decided by a paired t-test, two-sided, Holm–Bonferroni over all {tests} of them"
        f"{shared}; *not worse* by the interval's lower end against −{100 * margin:g} points, *the same* by "
        f"the whole interval within ±{100 * margin:g}. Greedy: the same difference of greedy accuracy, not "
        f"tested. With fewer than {FEWEST_SEEDS} seeds in common a claim counts as not run.",
        power_of_tests(found, margin, tests + others),
    )
    sections = [Section("The paper's claims", text, claims_table(found, plan.main))]
    missed = {a.claim.title: a.claim.why for a in found if a.verdict not in (SEEN, NOT_RUN) and a.claim.why}
    if missed:
        rows = [["claim that was not seen in every pair", "a guess at the reason, written after the results"]]
        rows += [[title, why] for title, why in missed.items()]
        sections.append(Section("Guesses", ("None of them was tested.",), rows))
    return sections


def power_of_tests(found: Sequence[Answer], effect: float, tests: int) -> str:
    """Return what the tests could have seen: their power for ``effect``, given the spread of their own paired
    differences."""
    spreads = [a.difference for a in found if a.p_holm is not None and a.difference and a.difference.error]
    if not spreads:
        return ""
    alone, corrected = (
        [paired_power(effect, d.error * d.n**0.5, d.n, level) for d in spreads if d.error]
        for level in (SIGNIFICANT, SIGNIFICANT / tests)
    )
    enough = sum(power >= 0.8 for power in corrected)
    return (
        f"With these seeds and spreads a true difference of {100 * effect:g} points is significant with a "
        f"median power of {median(alone):.2f} alone and {median(corrected):.2f} at {SIGNIFICANT}/{tests}, "
        f"Holm's first threshold (at least 0.8 in {enough} of {len(corrected)} tests). *Not seen* mostly "
        "means that these seeds cannot decide."
    )


def claims_table(found: Sequence[Answer], tuned: Collection[str]) -> Table:
    rows = [["claim", "the paper", "here", "difference", "seeds", "p (Holm)", "greedy", "verdict"]]
    last = ""
    words = {"greater": "better than", "match": "not worse than", "same": "the same as"}
    for a in found:
        title = "" if a.claim.title == last else a.claim.title
        paper = "" if a.claim.title == last else f"{a.claim.source}: {a.claim.paper}"
        last = a.claim.title
        b, a_ = (cell if cell in tuned else f"{cell} (untuned)" for cell in (a.b, a.a))
        rows.append([title, paper, f"{b} {words[a.claim.kind]} {a_}", *numbers_of(a), a.verdict])
    return rows


def numbers_of(a: Answer) -> list[str]:
    if a.difference is None or a.interval is None:
        return ["–"] * 4
    p = "–" if a.p_holm is None else f"{a.p_holm:.2g} ({a.p:.2g})"
    return [
        f"{100 * a.difference.value:+.1f} [{100 * a.interval[0]:+.1f}, {100 * a.interval[1]:+.1f}]",
        str(a.difference.n),
        p,
        "–" if a.other is None else f"{100 * a.other.value:+.1f}",
    ]


FIGURES_OF = {
    MAIN: ("figure1", "figure8", "figure11", "frontier"),  # figure 8 where no experiment is about k alone
    "k": ("figure8",),
    "ablation": (),
    "controls": ("controls",),
    "rare": ("figure7",),
    "quality": ("figure6",),
    "trust": ("figure10",),
    "clip": ("table6",),
    "sampling": ("figure5",),
}
TITLES = {
    MAIN: "The main cells",
    "k": "How often to sync",
    "ablation": "Humanline's parts",
    "controls": "Controls",
    "rare": "Sampling more rarely",
    "quality": "Data quality",
    "trust": "Trust-region syncing",
    "clip": "Clipping ranges",
    "sampling": "Clipping and sampling",
}


def title_of(experiment: str) -> str:
    """Return an experiment's heading; for an experiment that is not the paper's, its name in words."""
    return TITLES.get(experiment, experiment.replace("-", " ").replace("_", " ").capitalize())


def cell_sections(
    plan: Plan, mode: str, final: Sequence[Record], captions: Mapping[str, str]
) -> list[Section]:
    """Return a table and the figures of each experiment that has runs."""
    sections = []
    for name, cells in plan.cells(mode).items():
        here = [(cell, [r for r in final if r.cell == cell]) for cell in cells]
        if not any(runs for _, runs in here):
            sections.append(Section(title_of(name), ("No run of this experiment is finished.",)))
            continue
        stems = [stem for stem in FIGURES_OF.get(name, (name,)) if stem in captions]
        if name == MAIN and "k" in plan.cells(mode):
            stems = [stem for stem in stems if stem != "figure8"]
        if name == "ablation" and "sampling" not in plan.cells(mode) and "figure5" in captions:
            stems = ["figure5"]
        first = (stems[0], captions[stems[0]]) if stems else None
        sections.append(Section(title_of(name), (), cells_table(here, plan.measure), first))
        sections += [Section("", (), None, (stem, captions[stem])) for stem in stems[1:]]
    return sections


def cells_table(here: Sequence[tuple[str, Sequence[Record]]], measure: str) -> Table:
    rows = [
        [
            "cell",
            "seeds",
            measure,
            "greedy",
            "drift, nats/token",
            "tokens clipped",
            "examples",
            "CPU s",
        ]
    ]
    for cell, runs in here:
        clipped = [r.clipped for r in runs if r.clipped is not None]
        drift = [r.after["eval_drift"] for r in runs if "eval_drift" in r.after]
        short = [r for r in runs if r.examples < max(other.examples for other in runs)]
        rows.append(
            [
                cell,
                str(len(runs)),
                spread([r.after[SAMPLED] for r in runs if SAMPLED in r.after]),
                spread([r.after[GREEDY] for r in runs if GREEDY in r.after]),
                f"{sum(drift) / len(drift):+.3f}" if drift else "–",
                f"{sum(clipped) / len(clipped):.2%}" if clipped else "–",
                f"{min(r.examples for r in runs)}" + (f" to {max(r.examples for r in runs)}" if short else "")
                if runs
                else "–",
                f"{sum(part_seconds(r)['all'] for r in runs) / len(runs):.0f}" if runs else "–",
            ]
        )
    return rows


def spread(values: Sequence[float]) -> str:
    """Return the mean with its 95 % interval, per cent."""
    middle = mean(list(values))
    if middle is None:
        return "–"
    if middle.error is None:
        return f"{100 * middle.value:.1f} %"
    low, high = interval(middle)
    return f"{100 * middle.value:.1f} % [{100 * low:.1f}, {100 * high:.1f}]"


def tuning_sections(plan: Plan, chosen: Mapping[str, Settings], tuned: Tuned | None) -> list[Section]:
    """Return a table of the values tried in each main cell, with the chosen ones."""
    grids = [] if tuned is None else [tuned.lrs, tuned.then]
    columns = [sorted({value for grid in half.values() for value in grid}) for half in grids[:1]]
    factors = sorted(
        {
            round(value / plan.then[cell][1], 6)
            for half in grids[1:]
            for cell, grid in half.items()
            for value in grid
        }
    )
    lrs = columns[0] if columns else []
    head = ["cell", *(f"lr {lr:g}" for lr in lrs), *(f"{plan.then_name} × {f:g}" for f in factors), "chosen"]
    rows = [head]
    for cell in plan.main:
        before = plan.then[cell][1]
        found = (
            []
            if tuned is None
            else [
                *(told(tuned.lrs.get(cell, {}).get(lr, [])) for lr in lrs),
                *(
                    told(
                        next(
                            (v for x, v in tuned.then.get(cell, {}).items() if round(x / before, 6) == f), []
                        )
                    )
                    for f in factors
                ),
            ]
        )
        picked = ", ".join(f"{name.rpartition('.')[2]} {chosen[cell][name]:g}" for name in plan.tuned(cell))
        rows.append([cell, *found, picked])
    several = len(plan.tuning_seeds) > 1
    shown = f"seed{'s' * several} {', '.join(map(str, plan.tuning_seeds))}{': mean ± standard deviation' * several}"  # noqa: E501
    text = (
        f"The same rule for each cell: the learning rate first, then the {plan.then_name} at the best one; "
        f"the best mean of {plan.metric} on validation prompts is taken, of equals the smaller value "
        f"({shown}; per cent). A grid whose best value is at its edge is made longer, {plan.extend} times at "
        "most. Further experiments were not tuned. Where seeds lie far apart, others might have chosen "
        "otherwise.",
    )
    return [Section("Tuning", text, rows)]


def told(values: Sequence[float]) -> str:
    """Return the mean and standard deviation over seeds, per cent."""
    if not values:
        return "–"
    return f"{100 * fmean(values):.1f}" + (f" ± {100 * stdev(values):.1f}" if len(values) > 1 else "")


def origins(final: Sequence[Record], measure: str) -> Section:
    """Return the runs behind each cell's numbers."""
    cells: dict[str, list[Record]] = {}
    for record in final:
        cells.setdefault(record.cell, []).append(record)
    rows = [["cell", f"run folders: {measure} after training"]]
    for cell, runs in cells.items():
        rows.append(
            [
                cell,
                ", ".join(
                    f"{r.name}: {100 * r.after[SAMPLED]:.1f}" for r in sorted(runs, key=lambda r: r.seed)
                ),
            ]
        )
    text = ("Each run folder holds `config.yaml`, `metrics.jsonl` and `summary.json`.",)
    return Section("Where the numbers come from", text, rows)
