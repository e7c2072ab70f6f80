"""The command for the study, from plans to reports, with one plan for each of the two embedded tasks.

    python -m study full                 # tunes the main cells, then runs everything: hours; the same command goes on where it was
    python -m study quick                # with what full chose: the main figure and some more, three seeds, in minutes
    python -m study report               # of what is finished so far
    python -m study full --task instruct # one of the tasks
    python -m study quick --seeds 11,12,13 --name other-seeds
    python -m study evidence             # the second plan, study/evidence.yaml: days in the background; goes on where it was
    python -m study evidence-report      # its page, of the records that there are

Runs lie in runs/<name>/<task>/, reports in results/<name>/. report.md there is the first page, for both
tasks; each task's own report (report.md, figures, runs.jsonl) is in <task>/.
"""  # noqa: E501

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from common.errors import ConfigError, StoppedError, require
from common.files import check_name
from config.cli import answered
from launch.grid import Run, Settings
from study.claims import Findings
from study.plan import CHOSEN, FULL, QUICK, TASKS, Plan, read_chosen, read_plan
from study.records import collect, finished, write_records
from study.runner import run_all
from study.tuning import Tuned, tune, write_chosen

EVIDENCE, EVIDENCE_REPORT = "evidence", "evidence-report"


@dataclass(frozen=True)
class Part:
    """One plan's part of a study."""

    name: str
    plan: Path
    runs_dir: Path
    out: Path
    records: Path | None


@dataclass(frozen=True)
class Done:
    """A part whose runs are finished or, after ``report``, as many of them as there are."""

    part: Part
    plan: Plan
    tuned: Tuned | None
    chosen: Mapping[str, Settings]
    runs: Sequence[Run]

    @property
    def claims(self) -> Path:
        return self.part.plan.with_name("claims.yaml")


def main(words: Sequence[str] | None = None) -> int:
    options = parser().parse_args(words)
    return answered(lambda: (evidence if options.mode in (EVIDENCE, EVIDENCE_REPORT) else act)(options))


def parser() -> argparse.ArgumentParser:
    about = argparse.ArgumentParser(
        "python -m study", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    about.add_argument("mode", choices=(FULL, QUICK, "report", EVIDENCE, EVIDENCE_REPORT))
    about.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="runs at a time, one core each")
    about.add_argument("--seeds", default="", metavar="LIST", help="these instead of 1, 2, …, as in 11,12,13")
    about.add_argument("--name", help="of the folders; study, or quick-study")
    about.add_argument("--runs-dir", type=Path, help="where runs lie; runs/<name> if not given")
    about.add_argument("--out", type=Path, help="where the report goes; results/<name> if not given")
    about.add_argument(
        "--records",
        type=Path,
        metavar="PATH",
        help="runs that it has are not done again: a runs.jsonl, or the folder of an earlier report",
    )
    chosen = about.add_mutually_exclusive_group()
    chosen.add_argument("--task", choices=tuple(TASKS), help="one task's plan alone; both if not given")
    chosen.add_argument(
        "--plan", type=Path, metavar="FILE", help="another plan; what is chosen goes beside it"
    )
    about.add_argument("--only", default="", metavar="LIST", help="only these experiments, as in main,k")
    return about


def evidence(options: argparse.Namespace) -> None:
    """Do what is missing of the second plan, or of the blocks of ``--only``, and write its page. Raises
    ConfigError for an option of the first plan, StoppedError if runs failed."""
    from study.evidence import PLAN, PUBLISHED, known, read_evidence, run_evidence
    from study.evidence_page import write_page

    require(options.jobs >= 1, "--jobs", options.jobs, "must be at least 1")
    for key in ("seeds", "task"):
        given = getattr(options, key)
        require(
            not given,
            f"--{key}",
            given,
            f"is for {FULL}, {QUICK} and report; study/evidence.yaml says it here",
        )
    name = options.name or EVIDENCE
    runs_dir, out = (options.runs_dir or Path("runs") / name).resolve(), options.out or Path("results") / name
    plan = read_evidence(options.plan or PLAN)
    wanted = plan.only(options.only.split(",")) if options.only else plan
    files = [options.records] if options.records else [PUBLISHED]
    failed: list[str] = []
    if options.mode == EVIDENCE:
        failed = run_evidence(wanted, runs_dir, out, files, options.jobs, partial(print, flush=True))
    print(write_page(plan, known(plan, runs_dir, [*files, out / "runs.jsonl"]), out))
    if failed:
        raise StoppedError(
            f"failed: {', '.join(failed)}; logs in {runs_dir}/logs. The same command tries again"
        )


def parts_of(options: argparse.Namespace) -> list[Part]:
    """Return a part for each plan. A task's plan has subfolders of its own; the plan of ``--plan`` has none.
    Raises ConfigError."""
    name = options.name or ("quick-study" if options.mode == QUICK else "study")
    check_name("--name", name)
    runs_dir = (options.runs_dir or Path("runs") / name).resolve()
    out = options.out or Path("results") / name
    if options.records is not None:
        require(options.records.exists(), "records", options.records, "is not a file, and no folder")
    if options.plan is not None:
        return [Part("", options.plan, runs_dir, out, options.records)]
    tasks = [options.task] if options.task else list(TASKS)
    parts = []
    for task in tasks:
        records = options.records
        if records is not None and records.is_dir():
            records = records / task / "runs.jsonl"
        elif records is not None and len(tasks) > 1:
            raise ConfigError("records", records, "is of one task: give --task, or the folder of both")
        known = records if records is not None and records.exists() else None
        parts.append(Part(task, TASKS[task], runs_dir / task, out / task, known))
    return parts


def act(options: argparse.Namespace) -> None:
    require(options.jobs >= 1, "--jobs", options.jobs, "must be at least 1")
    mode = FULL if options.mode == "report" else options.mode
    parts = [(part, read_plan(part.plan)) for part in parts_of(options)]
    seeds = seeds_of(options.seeds)
    asked = options.only.split(",") if options.only else None
    for one in asked or ():
        there = list(dict.fromkeys(name for _, plan in parts for name in plan.cells(mode)))
        require(one in there, "--only", one, f"is no experiment of {mode}; there are {', '.join(there)}")
    if asked is not None:  # a task without any of these experiments is neither tuned nor reported
        parts = [(part, plan) for part, plan in parts if set(asked) & set(plan.cells(mode))]
    chosen_before = {
        part.name: read_chosen(part.plan.with_name(CHOSEN), plan)
        for part, plan in parts
        if mode == QUICK and (len(parts) == 1 or part.plan.with_name(CHOSEN).is_file())
    }  # for every part, read and validated before anything is run
    if options.mode != "report":
        for _, plan in parts:
            print(forecast(plan, mode, options.jobs))
    done: list[Done] = []
    for part, plan in parts:
        tuned = tune_part(plan, part, options) if mode == FULL else None
        chosen = tuned.chosen if tuned else chosen_before.get(part.name, {})
        if not chosen:
            print(unfinished(plan, part, tuned))
            done.append(Done(part, plan, tuned, {}, []))
            continue
        experiments = [name for name in plan.cells(mode) if asked is None or name in asked]
        cells = {cell for name in experiments for cell in plan.cells(mode)[name]}
        wanted = [run for run in plan.runs(mode, chosen, seeds) if run.cell in cells]
        if options.mode != "report":
            do(plan, wanted, part, options.jobs)
        done.append(Done(part, plan, tuned, chosen, [*(tuned.runs if tuned else []), *wanted]))
    found = report_all(mode, done)
    if options.plan is None and options.task is None:
        from study.first_page import write_first_page

        print(write_first_page(parts[0][0].out.parent, found))


def forecast(plan: Plan, mode: str, jobs: int) -> str:
    """Return a message with the cost of all of ``mode``, to be printed before it begins."""
    runs = plan.all_runs(mode)
    hours = sum(map(plan.cost, runs)) / 3600
    return (
        f"{plan.title}: {len(runs)} runs, about {hours:.1f} CPU hours, {hours / jobs:.1f} hours {jobs} at a "
        "time, were none of them there; runs that are finished are not done again"
    )


def report_all(mode: str, done: Sequence[Done]) -> dict[str, Findings]:
    """Write each task's report; the tests of all of them are corrected together."""
    from study.claims import p_values_of
    from study.report import ask, write_report  # imports matplotlib, which a wrong command line is spared

    records = {one.part.name: collect(one.runs, one.part.runs_dir, one.part.records) for one in done}
    tests = {
        one.part.name: p_values_of(ask(one.plan, mode, records[one.part.name], one.claims).answers())
        for one in done
    }
    found = {}
    for one in done:
        name, plan = one.part.name, one.plan
        if not one.chosen:
            found[name] = Findings("", plan.title, plan.measure, (), {}, None, 0.0, 0, 0)
            continue
        found[name] = write_report(
            plan,
            mode,
            one.chosen,
            records[name],
            len(one.runs),
            one.part.out,
            " ".join(["python -m study", *(sys.argv[1:])]),
            claims=one.claims,
            tuned=one.tuned,
            others=[p for other, own in tests.items() if other != name for p in own],
        )
        print(found[name].said)
    return found


def tune_part(plan: Plan, part: Part, options: argparse.Namespace) -> Tuned:
    """Tune the main cells by the plan's rule. ``report`` runs nothing: if runs of the tuning are missing, it
    reads the file of an earlier tuning; without that file it chooses nothing and returns the runs that the
    tuning asked for."""
    path = part.plan.with_name(CHOSEN)
    asked: list[Run] = []

    def measure(runs: Sequence[Run]) -> dict[str, float]:
        asked.extend(runs)
        if options.mode != "report":
            do(plan, runs, part, options.jobs)
        return {r.name: r.after[plan.metric] for r in collect(runs, part.runs_dir, part.records)}

    try:
        tuned = tune(plan, measure)
    except KeyError:
        if options.mode != "report":
            raise
        if path.is_file():
            return Tuned(read_chosen(path, plan))
        return Tuned(runs=list({run.name: run for run in asked}.values()))  # an extended grid asks again
    if options.mode == FULL:
        write_chosen(plan, tuned.chosen, path)
    return tuned


def unfinished(plan: Plan, part: Part, tuned: Tuned | None) -> str:
    """Return the message about a plan whose tuning is not finished. The records of its finished runs are
    written, so that the study can continue elsewhere (``--records``)."""
    begun = collect(tuned.runs, part.runs_dir, part.records) if tuned is not None else []
    if begun:
        part.out.mkdir(parents=True, exist_ok=True)
        write_records(part.out / "runs.jsonl", begun)
    kept = f"; {len(begun)} of its runs are, in {part.out / 'runs.jsonl'}" if begun else ""
    return f"{plan.title}: not run, as its tuning is not finished (python -m study full){kept}"


def do(plan: Plan, runs: Sequence[Run], part: Part, jobs: int) -> None:
    there = {record.name for record in collect(runs, part.runs_dir, part.records)}
    run_all(
        [run for run in runs if run.name not in there or finished(part.runs_dir / run.name)],
        part.runs_dir,
        jobs,
        plan.cost,
    )


def seeds_of(text: str) -> list[int] | None:
    """Return the seeds of a comma-separated list; None for an empty text. Raises ConfigError."""
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
