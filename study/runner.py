"""The study's runs on this machine, done by a few processes, each of which does one run after another without
importing anything again.

A run is exactly what ``python train.py`` with its settings does, in its own folder. If it is killed at any
instant, the same study continues it. A finished run becomes a record, and its folder is deleted.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from common.errors import StoppedError
from common.files import write_whole
from common.progress import progress
from common.worker_process import live_while
from launch.grid import CONFIG_DIR, Run
from reports.provenance import git_commit, machine
from study.plan import Plan, known, pace, spent_hours, told
from study.records import FACTS, Record, append_record, finished, read_record

RUNS_OF_A_PROCESS = 40
"""Runs that a process does, approximately, before it is replaced, so that memory kept by libraries does not
grow for hours. (The executor's own max_tasks_per_child hangs in Python 3.11.)"""


@dataclass(frozen=True)
class Outcome:
    name: str
    error: str | None


def run_plan(
    plan: Plan,
    runs_dir: Path,
    out: Path,
    published: Sequence[Path],
    jobs: int,
    say: Callable[[str], None],
) -> list[str]:
    """Do what is missing, in order, and return the names of runs that failed. Records are appended to
    ``out``/runs.jsonl one by one; those of ``published`` are known too."""
    file = out / "runs.jsonl"
    out.mkdir(parents=True, exist_ok=True)
    runs = plan.runs()
    runs_by_name = {run.name: run for _, run in runs}
    kept = {run.name for block, run in runs if run.seed in block.kept}
    costs = {run.name: plan.cost(block, run) for block, run in runs}

    def keep(name: str) -> None:
        append_record(file, read_record(runs_by_name[name], runs_dir / name))
        # First, so that --report in between reads no half of a folder
        (runs_dir / name / FACTS).unlink(missing_ok=True)
        if name not in kept:
            shutil.rmtree(runs_dir / name)

    for name in runs_by_name:  # finished just before an earlier start was killed
        if finished(runs_dir / name):
            keep(name)
    failed: list[str] = []
    while chunk := _next(plan, there := known(plan, runs_dir, (*published, file)), failed, jobs):
        say(told(plan, there, failed))
        failed += run_all(chunk, runs_dir, jobs, lambda run: costs[run.name], keep)
    say(told(plan, there, failed))
    return failed


def _next(plan: Plan, there: Mapping[str, Record], failed: Sequence[str], jobs: int) -> list[Run]:
    """Return the next runs: as many as a process does, of one part, within its hours."""
    spent, slower = spent_hours(plan, there), pace(plan, there)
    next_runs: list[Run] = []
    part = ""
    for block, run in plan.distinct_runs():
        hours = slower * plan.cost(block, run) / 3600
        if run.name in there or run.name in failed or spent[block.part] + hours > plan.hours[block.part]:
            continue
        if len(next_runs) == jobs * RUNS_OF_A_PROCESS or block.part != (part or block.part):
            break
        part = block.part
        spent[part] += hours
        next_runs.append(run)
    return next_runs


def run_all(
    runs: Sequence[Run],
    runs_dir: Path,
    jobs: int,
    cost_of: Callable[[Run], float],
    after: Callable[[str], None],
) -> list[str]:
    """Do ``runs``, ``jobs`` at a time, and return the names of those that failed. ``cost_of``: approximate
    seconds of one core that a run takes, for the estimate of the time left. ``after`` is called with the name
    of each that finished."""
    os.environ["OMP_NUM_THREADS"] = "1"  # read by the processes when they import torch
    failed: list[str] = []
    cost = {run.name: cost_of(run) for run in runs}
    with progress(round(sum(cost.values())), "study", unit="CPU second") as bar:
        for outcome in finish(runs, runs_dir, jobs):
            bar.set_postfix_str(f"last {outcome.name}", refresh=False)
            bar.update(cost[outcome.name])
            if outcome.error:
                failed.append(outcome.name)
                print(f"{outcome.name}: {outcome.error}", file=sys.stderr, flush=True)
            else:
                after(outcome.name)
    return failed


def finish(runs: Sequence[Run], runs_dir: Path, jobs: int) -> Iterator[Outcome]:
    """Yield the outcomes of ``runs`` as they come, from separate processes. Raises StoppedError if the
    processes cannot go on."""
    with ProcessPoolExecutor(jobs, get_context("spawn"), live_with, (os.getpid(),)) as pool:
        try:
            for future in as_completed([pool.submit(one, run, runs_dir) for run in runs]):
                yield future.result()
        except BrokenProcessPool as error:
            raise StoppedError(
                "a process of the study was killed (memory?); the same command goes on"
            ) from error
        except KeyboardInterrupt:
            pool.shutdown(cancel_futures=True)
            raise StoppedError("interrupted; the same command goes on") from None


def live_with(study: int) -> None:
    """End this process when the study's process is gone; otherwise it would go on with its runs beside those
    of the next study."""
    live_while(study, lambda: os._exit(1))


def one(run: Run, runs_dir: Path) -> Outcome:
    """Do a run in this process; its output goes to its log."""
    import torch

    from launch.composing import compose_config
    from train import train

    torch.set_num_threads(1)
    # A record describes the weights before and after training. Evaluations in between do not change them, nor
    # do the report's charts, which take up to a third of the training time. Settings of the plan come later
    # and win.
    overrides = ["eval_every=0", "report=false", *run.overrides(), f"runs_dir={runs_dir}"]
    folder, log = runs_dir / run.name, runs_dir / "logs" / f"{run.name}.out"
    log.parent.mkdir(parents=True, exist_ok=True)
    wall, cpu, commit = time.perf_counter(), time.process_time(), git_commit(CONFIG_DIR.parent)
    with (
        log.open("a", encoding="utf-8") as out,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(out),
    ):
        try:
            sys.argv = ["train.py", *overrides]  # the run's summary records this command line
            train(compose_config(overrides), run.name)
        except (Exception, SystemExit) as error:
            traceback.print_exc()
            return Outcome(
                run.name, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            )
    keep(
        folder,
        {
            "wall_seconds": time.perf_counter() - wall,
            "cpu_seconds": time.process_time() - cpu,
            "load": os.getloadavg()[0],
            "commit": commit,
            "machine": machine(),
        },
    )
    return Outcome(run.name, None)


def keep(folder: Path, facts: dict[str, Any]) -> None:
    """Write the study's measurements of a finished run, and delete what only an unfinished run needs."""
    write_whole(folder / FACTS, json.dumps(facts, indent=2))
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
