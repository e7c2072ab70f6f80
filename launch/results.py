"""The results of a sweep as one table, from its file or from run folders.

    python -m launch.results sweeps/adder.yaml
    python -m launch.results runs/adder-* --select lr --baseline adder-dpo-no_humanline
    python -m launch.results sweeps/surface.yaml --frontier
    python -m launch.results runs/pilot-* --power 0.05 --tests 12
    python -m launch.results sweeps/claim.yaml --power

For each cell, the table has the mean and standard error over seeds. Where --select names keys that were tried
out, these are the numbers of the setting with the best validation metric. Paired tests over seeds with Holm's
correction compare the cells or, with --frontier, a sweep's arms with what is tried held equal
(launch/frontier.py). --power says what such tests can see. A sweep file with ``tests:`` has these decided
instead (launch/decisions.py). Each cell has a learning curve. For a run that is not finished, the status is
shown: not started, waiting, running, interrupted, or failed, which comes with the run's last message and its
log. Writes results/<name>/: index.html, overview.svg, table.md, table.csv, tests.csv, runs.csv; prints the
first two tables.
"""

from __future__ import annotations

if not __package__:  # started by its path, where nothing beside its folder is found
    raise SystemExit("error: type python -m launch.results")

import argparse
import csv
import io
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from common.errors import require
from common.files import check_name, write_whole
from common.markdown import table
from common.options import options_of, run_folder
from config.cli import answered
from launch.collect import Cell, Result, cells_of, of_folders, of_sweep
from launch.decisions import NOTE, Decision, decide, decision_rows, planned_power_rows
from launch.frontier import Frontier, power_rows
from launch.grid import Sweep, read_sweep
from launch.slurm import ROOT
from launch.state import FAILED
from reports.evaluations import MEASURES, names_of, of_name
from reports.outcome import FINISHED
from reports.statistics import Comparison, compare, shown, shown_p

PREFERRED = ("eval_accuracy_sampled", "eval_reward_accuracy", "eval_reward_margin", "eval_loss")
SHOWN = tuple(key for key, *_ in MEASURES if key != "eval_loss")
MEASURED_BY = (
    *("data.name", "data.eval_path", "data.eval_split", "data.eval_fraction", "data.verifier"),
    *("n_eval_examples", "n_eval_prompts", "n_eval_samples", "sampler.temperature", "sampler.top_p"),
)
"""Settings that decide on what held-out data, and how, the columns ``eval_*`` are measured."""
OF_TESTS = -1.0
"""``--power`` without a number"""


def metrics_of(results: Iterable[Result]) -> list[str]:
    """Return the columns: held-out metrics in a fixed order, then those of named sets, then every number of
    the evaluation files."""
    present = {key for run in results for key in run.values}
    named = [of_name(key, name) for name in names_of(sorted(present)) for key in SHOWN]
    return [key for key in (*SHOWN, *named) if key in present] + sorted(key for key in present if "/" in key)


def rows(cells: Sequence[Cell], metrics: Sequence[str]) -> list[list[str]]:
    """Return the table as text, heading first."""
    select = sorted({key for cell in cells for key in cell.selected})
    out = [["cell", "seeds", *select, *metrics]]
    for cell in cells:
        tried = f" (of {len(cell.tried)})" if len(cell.tried) > 1 else ""
        selected = [f"{cell.selected[key]}{tried}" for key in select]
        out.append([cell.name, cell.progress, *selected, *(shown(cell.mean(metric)) for metric in metrics)])
    return out


def test_rows(comparisons: Sequence[Comparison]) -> list[list[str]]:
    p_values = ["p (t)", "p (t), Holm", "p (Wilcoxon)", "p (Wilcoxon), Holm"]
    out = [["comparison", "difference", "seeds", *p_values, ""]]
    for c in comparisons:
        values = map(shown_p, (c.p_t, c.p_t_holm, c.p_wilcoxon, c.p_wilcoxon_holm))
        what = [f"{c.b} − {c.a}", shown(c.difference), str(c.difference.n)]
        out.append([*what, *values, "significant" if c.significant else ""])
    return out


def failure(run: Result) -> str:
    """Return the last message of a failed run, protected from Markdown and HTML."""
    return f"- {run.name} failed: `{run.about.detail.replace('`', chr(39))}` ({run.about.log})"


def write_csv(path: Path, table: Iterable[Iterable[object]]) -> None:
    text = io.StringIO(newline="")
    csv.writer(text).writerows(table)
    write_whole(path, text.getvalue())


def numeric_rows(cells: Sequence[Cell], metrics: Sequence[str]) -> list[list[object]]:
    """Return the table with full precision: a column each for mean, standard error and number of seeds."""
    out: list[list[object]] = [
        ["cell", "finished", "planned", *(f"{m} {part}" for m in metrics for part in ("mean", "se", "n"))]
    ]
    for cell in cells:
        means = [cell.mean(metric) for metric in metrics]
        numbers = [part for m in means for part in ((m.value, m.error, m.n) if m else (None, None, 0))]
        out.append([cell.name, len(cell.finished), len(cell.chosen), *numbers])
    return out


def run_rows(results: Sequence[Result], cells: Sequence[Cell]) -> list[list[object]]:
    """Return a row for every run, chosen or not."""
    metrics = sorted({key for run in results for key in run.values})
    # by id: names may stand twice
    cells_by_run = {id(run): cell.name for cell in cells for runs in cell.tried for run in runs}
    chosen = {id(run) for cell in cells for run in cell.chosen}
    head = ["run", "cell", "seed", "status", "said last", "log", "steps", "chosen"]
    out: list[list[object]] = [[*head, *metrics]]
    for run in results:
        status = (run.status, run.about.detail, run.about.log or "", run.step, id(run) in chosen)
        about = (run.name, cells_by_run[id(run)], run.seed, *status)
        out.append([*about, *(run.values.get(metric) for metric in metrics)])
    return out


def options_of_runs(program: str, about: str | None) -> argparse.ArgumentParser:
    """Return the parser of a program that reads runs, with the options that ``load`` reads but --select."""
    parser = options_of(program, about)
    parser.add_argument("sources", nargs="+", type=run_folder, help="a sweep file, or run folders")
    parser.add_argument("--name", help="the sweep's other name, as for launch.sweep")
    parser.add_argument(
        "--logs", type=Path, default=Path("logs"), help="where the logs of sweeps lie, as for launch.sweep"
    )
    return parser


def main(words: Sequence[str] | None = None) -> int:
    about = options_of_runs("python -m launch.results", __doc__)
    option = about.add_argument
    option(
        "--select", default="", metavar="KEYS", help="settings tried out: the best is chosen on validation"
    )
    option(
        "--validation",
        metavar="METRIC",
        help=f"chosen by; of {', '.join(PREFERRED)} the first that runs have",
    )
    option("--metric", help="compared by the tests and drawn; the validation metric if not given")
    option("--baseline", metavar="CELL", help="test each cell against this one, instead of all pairs")
    option(
        "--frontier",
        action="store_true",
        help="compare the sweep's arms (cells) at one common setting, each tuned, and at equal KL",
    )
    option(
        "--power",
        type=float,
        nargs="?",
        const=OF_TESTS,
        metavar="EFFECT",
        help="the power that the tests have for this difference, and the seeds that 0.8 needs; without a "
        "number, for the tests of the sweep file",
    )
    option(
        "--tests",
        type=int,
        metavar="N",
        help="with --power: tests in the family; as many as made if not given",
    )
    option("--out", type=Path, help="where to write; results/<name> if not given")
    options = about.parse_intermixed_args(words)
    return answered(lambda: print(report(options)))


def report(options: argparse.Namespace) -> str:
    """Write every form of the table and return the text to print. Raises ConfigError."""
    # Importing matplotlib takes a second, which a wrong command line is spared.
    from launch.pictures import write_html

    results, name, select, sweep = load(options)
    validation, metric = measured_by(options, results)
    cells = cells_of(results, select, validation)
    names = [cell.name for cell in cells]
    require(
        options.baseline in (None, *names),
        "--baseline",
        options.baseline,
        f"is no cell; cells: {', '.join(names)}",
    )
    failed = [run for run in results if run.status == FAILED]
    tests, frontier = comparison(options, sweep, cells, metric)
    arms = [] if frontier is None else frontier.rows()
    decisions = [] if sweep is None else decide(sweep, cells)
    metrics = metrics_of(results)
    compares = len(tests) if tests or not decisions else None
    notes = [*notes_of(results, select, validation, metric, compares), *apart(cells)]
    notes += [] if frontier is None else [FRONTIER]
    powers, of = powers_of(options, tests, decisions)
    folder = options.out or Path("results") / name
    folder.mkdir(parents=True, exist_ok=True)
    cell_table, test_table = rows(cells, metrics), test_rows(tests)
    decided = decision_rows(decisions) if decisions else []
    text = "\n\n".join(
        [
            f"# {name}",
            notes[0],
            table(cell_table[0], cell_table[1:]),
            *(["\n".join(map(failure, failed))] if failed else []),
            *notes[1:],
            *([table(arms[0], arms[1:])] if arms else []),
            *([table(test_table[0], test_table[1:])] if tests else []),
            *([NOTE.format(len(decisions)), table(decided[0], decided[1:])] if decided else []),
            *([f"Power for {of}:", table(powers[0], powers[1:])] if powers else []),
        ]
    )
    write_whole(folder / "table.md", text + "\n")
    write_csv(folder / "table.csv", numeric_rows(cells, metrics))
    write_csv(folder / "tests.csv", test_table)
    write_csv(folder / "runs.csv", run_rows(results, cells))
    if decided:
        write_csv(folder / "decisions.csv", decided)
    parts: dict[str, object] = {"name": name, "planned": decided, "planned_note": NOTE.format(len(decisions))}
    parts |= {"notes": notes, "failed": failed, "table": cell_table, "arms": arms, "powers": powers}
    parts["tests"] = test_table if tests else []
    drawn = None if frontier is None else frontier.figure()
    write_html(folder / "index.html", cells, metric, drawn, parts)
    written = "index.html, overview.svg, table.md, table.csv, tests.csv, runs.csv"
    return f"{text}\n\nwritten to {folder}/: {written}{', decisions.csv' if decided else ''}"


def measured_by(options: argparse.Namespace, results: Sequence[Result]) -> tuple[str, str]:
    """Return (the validation metric, the metric that is compared). Raises ConfigError for one that no
    finished run has."""
    present = {key for run in results for key in run.values}
    validation = options.validation or next((m for m in PREFERRED if m in present), PREFERRED[0])
    require(
        validation.startswith("eval_"),
        "--validation",
        validation,
        "is no validation metric (eval_…); test data choose nothing",
    )
    for option in ("metric", "validation"):
        metric = getattr(options, option)
        good = not present or metric is None or metric in present
        there = ", ".join(sorted(present))
        require(good, f"--{option}", metric, f"is a number of no finished run; there are {there}")
    return validation, options.metric or validation


def powers_of(
    options: argparse.Namespace, tests: Sequence[Comparison], decisions: Sequence[Decision]
) -> tuple[list[list[str]], str]:
    """Return (the table of --power, empty without it; what it is the power for)."""
    if options.power is None:
        return [], ""
    if options.power is OF_TESTS:
        return planned_power_rows(decisions), "the planned tests"
    family = options.tests or len(tests) or 1
    return power_rows(tests, options.power, family), f"a difference of {options.power:g}"


def comparison(
    options: argparse.Namespace, sweep: Sweep | None, cells: Sequence[Cell], metric: str
) -> tuple[list[Comparison], Frontier | None]:
    """Return (the tests that the options ask for, of arms or of cells; the arms). Raises ConfigError."""
    refuse_together(options, sweep)
    if sweep is not None and options.frontier:
        frontier = Frontier.of(sweep, cells, metric)
        require(len(frontier.arms) > 1, "--frontier", sweep.name, "has finished runs of fewer than two arms")
        return frontier.contrasts(), frontier
    if sweep is not None and sweep.tests and options.baseline is None:
        return [], None
    return compare({cell.name: cell.values(metric) for cell in cells}, options.baseline), None


def refuse_together(options: argparse.Namespace, sweep: Sweep | None) -> None:
    """Raise ConfigError for options that have no meaning together, or without a sweep file."""
    power, tests, source = options.power, options.tests, options.sources[0]
    arms = options.frontier
    planned = sweep is not None and bool(sweep.tests)
    positive = power is None or power is OF_TESTS or 0 < power < math.inf
    for good, key, value, remedy in (
        (positive, "--power", power, "is a difference above 0"),
        (planned or power is not OF_TESTS, "--power", None, "needs a number, or a sweep file with tests:"),
        (tests is None or power is not None, "--tests", tests, "is a part of --power"),
        (tests is None or power is not OF_TESTS, "--tests", tests, "is given by the sweep file"),
        (tests is None or tests > 0, "--tests", tests, "must be 1 or more"),
        (
            not arms or options.baseline is None,
            "--baseline",
            options.baseline,
            "compares cells: leave --frontier out",
        ),
        (not arms or sweep is not None, "--frontier", source, "is of a sweep file, which names its arms"),
    ):
        require(good, key, value, remedy)


def notes_of(
    results: Sequence[Result], select: Sequence[str], validation: str, metric: str, tests: int | None
) -> list[str]:
    """Return what a reader has to know about the table, the choice and the ``tests``, where there are any."""
    finished = sum(run.status == FINISHED for run in results)
    notes = [f"Mean ± standard error over seeds. {finished} of {len(results)} runs are finished."]
    if select:
        flattering = " The same metric is reported, so chosen cells look a little better than they are."
        chosen = f"{', '.join(select)}: best mean {validation} per cell."
        notes.append(chosen + (flattering if metric == validation else ""))
    if tests is not None:
        notes.append(f"Tests: {metric}, paired by seed, two-sided, Holm–Bonferroni over {tests} comparisons.")
    return notes


def apart(cells: Sequence[Cell]) -> list[str]:
    """Return a warning if finished runs were not all measured alike; the numbers of such cells do not
    compare."""
    ways = []
    for key in MEASURED_BY:
        by_value: dict[object, dict[str, None]] = {}
        for cell in cells:
            for run in cell.finished:
                by_value.setdefault(run.settings.get(key), {})[cell.name] = None
        if len(by_value) > 1:
            each = (f"{value} in {', '.join(names)}" for value, names in by_value.items())
            ways.append(f"{key} is {', '.join(each)}")
    return [f"Not measured alike: {'; '.join(ways)}."] if ways else []


FRONTIER = (
    "Common setting: the one whose mean over all arms is best. Each tuned: the best mean of each arm, of as "
    "many settings; chosen by the same numbers, so it looks a little better than it is. Equal KL: the mean "
    "distance between the arms' frontiers (the best value at a KL from the start or below) where both reach."
)


def load(options: argparse.Namespace) -> tuple[list[Result], str, list[str], Sweep | None]:
    """Return (results, name, keys to select over, sweep) for the command line. Raises ConfigError."""
    select = [key for key in options.select.split(",") if key]
    if options.name is not None:
        check_name("--name", options.name)
    files = [path for path in options.sources if path.suffix in (".yaml", ".yml")]
    if not files:
        sweep = None
        results = of_folders(options.sources, ROOT / options.logs)
        name = options.name or options.sources[0].resolve().name.rstrip("*-")
    else:
        why = "stands alone: give one sweep file, or run folders"
        require(len(options.sources) == 1, "sources", files[0], why)
        sweep = read_sweep(files[0])
        name = options.name or sweep.name
        sweep = replace(sweep, name=name)
        results = of_sweep(sweep.runs(), (ROOT / options.logs / name).resolve())
        select = select or list(sweep.select)
    settings = {key for run in results for key in run.settings}
    for key in set(select) - settings:
        near = ", ".join(sorted(one for one in settings if one.startswith(f"{key}.")))
        require(False, "--select", key, f"is a setting of no run{near and f'; there are {near}'}")
    return results, name, select, sweep


if __name__ == "__main__":
    sys.exit(main())
