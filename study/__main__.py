"""The study, from plan to report.

    python -m study full           # tunes the twelve cells, then runs everything: hours on two cores; the same command goes on
    python -m study quick          # with what full chose: the main figure, k and the controls, three seeds, in minutes
    python -m study report         # of what is finished so far
    python -m study quick --seeds 11,12,13 --name other-seeds

Runs lie in runs/<name>/, the report in results/<name>/ (report.html, report.md, figures, runs.jsonl).
"""  # noqa: E501

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml  # type: ignore[import-untyped]

from common.errors import ConfigError, StoppedError, require
from common.files import check_name, write_whole
from launch.grid import Run, Settings
from study.plan import CHOSEN, DEFAULT_NORM, FULL, PLAN, QUICK, TUNED, Plan, best, read_chosen, read_plan
from study.records import collect, finished
from study.runner import run_all


def main(words: Sequence[str] | None = None) -> int:
    options = parser().parse_args(words)
    try:
        act(options)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except StoppedError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def parser() -> argparse.ArgumentParser:
    about = argparse.ArgumentParser(
        "python -m study", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    about.add_argument("mode", choices=(FULL, QUICK, "report"))
    about.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="runs at a time, one core each")
    about.add_argument("--seeds", default="", metavar="LIST", help="these instead of 1, 2, …, as in 11,12,13")
    about.add_argument("--name", help="of the folders; study, or quick-study")
    about.add_argument("--runs-dir", type=Path, help="where runs lie; runs/<name> if not given")
    about.add_argument("--out", type=Path, help="where the report goes; results/<name> if not given")
    about.add_argument(
        "--records", type=Path, metavar="FILE", help="a runs.jsonl: runs that it has are not done again"
    )
    about.add_argument(
        "--plan", type=Path, default=PLAN, metavar="FILE", help="another plan; what is chosen goes beside it"
    )
    about.add_argument("--only", default="", metavar="LIST", help="only these experiments, as in main,k")
    return about


def act(options: argparse.Namespace) -> None:
    require(options.jobs >= 1, "--jobs", options.jobs, "must be at least 1")
    plan, mode = read_plan(options.plan), FULL if options.mode == "report" else options.mode
    name = options.name or ("quick-study" if mode == QUICK else "study")
    check_name("--name", name)
    runs_dir = (options.runs_dir or Path("runs") / name).resolve()
    seeds, groups = seeds_of(options.seeds), plan.cells(mode)
    asked = options.only.split(",") if options.only else list(groups)
    for one in asked:
        require(one in groups, "--only", one, f"is no experiment of {mode}; there are {', '.join(groups)}")
    tuning: list[Run] = []
    if mode == FULL:
        chosen, tuning = tune(plan, runs_dir, options)
    else:
        chosen = read_chosen(options.plan.with_name(CHOSEN), plan.main)
    cells = {cell for one in asked for cell in groups[one]}
    wanted = [run for run in plan.runs(mode, chosen, seeds) if run.cell in cells]
    if options.mode != "report":
        do(wanted, runs_dir, options)
    from study.report import write_report  # matplotlib takes a second that a wrong command line need not wait

    out = options.out or Path("results") / name
    records = collect([*tuning, *wanted], runs_dir, options.records)
    print(
        write_report(
            plan,
            mode,
            chosen,
            records,
            len(wanted) + len(tuning),
            out,
            " ".join(["python -m study", *(sys.argv[1:])]),
        )
    )


def tune(plan: Plan, runs_dir: Path, options: argparse.Namespace) -> tuple[dict[str, Settings], list[Run]]:
    """What the twelve cells are run with, by the plan's rule, and the runs that it was chosen by. ``report``
    runs nothing: it takes the file of an earlier tuning where the runs are not there."""
    halves: list[Run] = []
    values: dict[str, dict[float, float]] = {}
    lrs: dict[str, float] = {}
    if options.mode == "report" and not all(known(run, runs_dir, options.records) for run in plan.lr_runs()):
        return read_chosen(options.plan.with_name(CHOSEN), plan.main), []
    for half in ("lr", "norm"):
        runs = plan.lr_runs() if half == "lr" else plan.norm_runs(lrs)
        if options.mode != "report":
            do(runs, runs_dir, options)
        halves += runs
        for cell in plan.main:
            tried = plan.tuning_runs(cell, lrs.get(cell))
            by_name = {
                record.name: record.after[plan.metric] for record in collect(tried, runs_dir, options.records)
            }
            values[cell] = {}
            for key in dict.fromkeys(_tried(run, half) for run in tried):
                found = [by_name[run.name] for run in tried if _tried(run, half) == key]
                values[cell][key] = sum(found) / len(found)
        if half == "lr":
            lrs = {cell: best(values[cell]) for cell in plan.main}
    chosen: dict[str, Settings] = {
        cell: dict(zip(TUNED, (lrs[cell], best(values[cell])), strict=True)) for cell in plan.main
    }
    if options.mode == FULL:
        write_chosen(plan, chosen, options.plan.with_name(CHOSEN))
    return chosen, halves


def _tried(run: Run, half: str) -> float:
    return float(run.settings["lr" if half == "lr" else "model.max_grad_norm"])


def known(run: Run, runs_dir: Path, records: Path | None) -> bool:
    return bool(collect([run], runs_dir, records))


def do(runs: Sequence[Run], runs_dir: Path, options: argparse.Namespace) -> None:
    there = {record.name for record in collect(runs, runs_dir, options.records)}
    run_all(
        [run for run in runs if run.name not in there or finished(runs_dir / run.name)],
        runs_dir,
        options.jobs,
    )


def write_chosen(plan: Plan, chosen: dict[str, Settings], path: Path) -> None:
    """The file that ``quick`` reads."""
    rule = (
        "# Written by `python -m study full`: per cell the learning rate, then the gradient norm, with the "
        "best mean "
        f"{plan.metric} on validation\n# (of lr {list(plan.lrs)} at norm {DEFAULT_NORM}, then norms "
        f"{sorted({DEFAULT_NORM, *plan.norms})} at that lr; seeds {list(plan.tuning_seeds)}).\n"
    )
    write_whole(path, rule + yaml.safe_dump({"cells": chosen}, sort_keys=False))


def seeds_of(text: str) -> list[int] | None:
    """Raises ConfigError."""
    if not text:
        return None
    require(
        all(word.strip().isdigit() for word in text.split(",")),
        "--seeds",
        text,
        "must be whole numbers, as in 11,12,13",
    )
    seeds = [int(word) for word in text.split(",")]
    require(
        len(set(seeds)) == len(seeds), "--seeds", text, "names a seed twice: runs of one seed are one run"
    )
    return seeds


if __name__ == "__main__":
    sys.exit(main())
