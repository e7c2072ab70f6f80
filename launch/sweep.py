"""The command for a sweep, which prints its plan, does its runs on this machine, or submits them to Slurm.

    python -m launch.sweep sweeps/adder.yaml                      # the plan: runs, their states, commands, cost
    python -m launch.sweep sweeps/adder.yaml --local 2            # run here, two at a time
    python -m launch.sweep sweeps/table3.yaml --site my.yaml --submit   # a Slurm job array
    python -m launch.sweep sweeps/table3.yaml --memory          # what each cell needs of slurm.card
    python -m launch.sweep sweeps/adder.yaml n_examples=640       # … with settings of your own in every run

The same command again does what is left: finished runs are skipped, queued ones left alone, and others go on
from their last checkpoint. Exit codes: 0 all is well; 1 runs failed, or Slurm refused; 2 the sweep is not
valid; 75 stopped, start again to go on.
"""  # noqa: E501

from __future__ import annotations

if not __package__:  # started by its path, where nothing beside its folder is found
    raise SystemExit("error: type python -m launch.sweep")

import argparse
import fnmatch
import re
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from common.errors import ConfigError, StoppedError, require
from common.files import read_object
from common.options import options_of
from common.progress import SOON, progress, pulse
from config.cli import answered
from config.schema import CARDS
from config.unread import leaves, unread
from launch.grid import Run, Sweep, parse_overrides, read_sweep
from launch.local import STOPPED, Pool, failures
from launch.slurm import (
    ROOT,
    Job,
    SlurmError,
    command,
    describe,
    largest_array,
    make_job,
    parts,
    queued,
    read_site,
    script,
    submit,
)
from launch.state import CHANGED, Composer, State, inspect, named
from reports.metrics import numbers
from reports.outcome import FINISHED

QUEUED = "in the queue"
_TOKENS = re.compile(r"(\d+) tokens to train on")
_SIZE = re.compile(r"([\d.]+) M parameters")
DRY_RUN_SECONDS = 1800.0


def main(words: Sequence[str] | None = None) -> int:
    options = parser().parse_intermixed_args(words)
    return answered(lambda: act(options))


def parser() -> argparse.ArgumentParser:
    about = options_of("python -m launch.sweep", __doc__)
    option = about.add_argument
    option("sweep", type=Path, help="a sweep file (the form: launch/grid.py)")
    option("settings", nargs="*", default=[], help="key=value for every run, as for train.py")
    option("--name", help="another name for the sweep, and so for its runs: when settings have changed")
    option("--logs", type=Path, default=Path("logs"), help="where logs lie, in a folder of the sweep's name")
    option("--only", default="*", metavar="PATTERN", help="only runs whose name fits, such as '*-dpo-*'")
    what = about.add_mutually_exclusive_group()
    what.add_argument("--local", type=int, metavar="N", help="run here, N at a time")
    what.add_argument("--submit", action="store_true", help="submit as a Slurm job array")
    what.add_argument(
        "--script", action="store_true", help="print the sbatch script that --submit would hand over"
    )
    option("--gpus", default="", help="with --local: GPU indices to share out, such as 0,1,2,3")
    option(
        "--retries", type=int, help="with --local: how often a failed run is started again, 1 if not given"
    )
    option("--site", type=Path, help="your cluster's defaults; copy launch/sites/example.yaml")
    option(
        "--set", action="append", default=[], metavar="SETTING=VALUE", help="job settings, such as nodes=8"
    )
    option("--memory", action="store_true", help="dry-run each cell: the memory it needs of slurm.card")
    option(
        "--rate",
        type=float,
        metavar="R",
        help="dry-run each cell; hours of training at R tokens a second on a rank (a run's "
        "tokens_per_second_per_rank)",
    )
    return about


def refuse_together(options: argparse.Namespace) -> list[str]:
    """Return the GPUs of --gpus. Raises ConfigError for a value out of range, and for an option of something
    that is not asked for."""
    local, retries, rate = options.local, options.retries, options.rate
    gpus = [gpu for gpu in options.gpus.split(",") if gpu]
    shared = local is None or (len(gpus) >= local and len(gpus) % max(local, 1) == 0)
    of_job = local is None or rate is not None or options.memory
    for good, key, value, remedy in (
        (local is None or local >= 1, "--local", local, "must be at least 1"),
        (retries is None or retries >= 0, "--retries", retries, "must be at least 0"),
        (retries is None or local is not None, "--retries", retries, "is a part of --local N"),
        (not gpus or local is not None, "--gpus", options.gpus, "is a part of --local N"),
        (not gpus or shared, "--gpus", options.gpus, f"cannot be shared out to {local} runs at a time"),
        (of_job or not options.set, "--set", options.set, "is of a Slurm job, not of --local"),
        (of_job or options.site is None, "--site", options.site, "is of a Slurm job, not of --local"),
        (rate is None or rate > 0, "--rate", rate, "must be above 0: tokens a second on a rank"),
    ):
        require(good, key, value, remedy)
    return gpus


def act(options: argparse.Namespace) -> int:
    gpus = refuse_together(options)
    sweep = read_sweep(options.sweep, parse_overrides(options.settings))
    sweep = sweep if options.name is None else replace(sweep, name=options.name)
    logs = (ROOT / options.logs / sweep.name).resolve()
    job = make_job(read_site(options.site) | sweep.slurm | parse_overrides(options.set))
    composer = Composer()
    runs = [run for run in sweep.runs() if fnmatch.fnmatch(run.name, options.only)]
    require(bool(runs), "--only", options.only, "fits the name of no run")
    states = [inspect(run, composer) for run in progress(runs, "settings", unit="run", delay=SOON)]
    refuse_unread(sweep, states)
    of_slurm = job if options.local is None else None
    for state in states if of_slurm is not None else ():
        with named(state.run):
            state.config.check_ranks(job.world_size)
    waiting = {} if of_slurm is None else queued(logs)
    hours = hours_of(states) | dry_hours(states, options.rate, job)
    todo = [s for s in states if s.kind not in (FINISHED, CHANGED) and s.run.name not in waiting]
    if not options.script:
        print(plan(sweep, states, waiting, hours, of_slurm), flush=True)
    if options.memory:
        print_memory(todo, job)
    refuse_changed(sweep, states, acting=options.submit or options.script or of_slurm is None)
    if of_slurm is None:
        retries = 1 if options.retries is None else options.retries
        return run_here(Pool(todo, logs, options.local, gpus, retries))
    if options.script:
        print_scripts(job, sweep.name, [state.run for state in todo or states], logs)
    elif options.submit:
        hand_over(sweep, todo, job, logs)
    return 0


def refuse_unread(sweep: Sweep, states: Sequence[State]) -> None:
    """Raise ConfigError for a key of the grid or the cells that no run reads: the runs would be the same."""
    for key in sorted(sweep.varied):
        asks = [state for state in states if any(leaves(key, state.run.settings.get(key)))]
        needs = [unread(state.config, key) for state in asks]
        if needs and None not in needs:
            values = list(dict.fromkeys(str(state.run.settings[key]) for state in asks))
            raise ConfigError(key, values, f"nothing would read it in any run: {needs[0]}; leave it out")


def dry_hours(states: Sequence[State], rate: float | None, job: Job) -> dict[str, float]:
    """Return run name -> hours, from one dry run per cell. ``rate``: tokens a second on a rank;
    None: no dry run is asked for."""
    if rate is None:
        return {}
    cells = {state.run.cell: state for state in reversed(states)}
    hours = {}
    for cell, state in progress(list(cells.items()), "dry runs (--rate)", unit="cell", delay=SOON):
        tokens = tokens_in(dry_run(state))
        if tokens is None:
            raise EstimateError(f"{state.run.name}: the dry run does not say how much it would train on")
        hours[cell] = hours_at(tokens, rate, job)
    return {state.run.name: hours[state.run.cell] for state in states}


def plan(
    sweep: Sweep, states: Sequence[State], waiting: dict[str, str], hours: dict[str, float], job: Job | None
) -> str:
    """Return the list of runs with the state and command of each, then the totals."""
    width = max(len(state.run.name) for state in states)
    lines = []
    for state in states:
        name = state.run.name
        kind = f"{state.kind} ({state.detail})" if state.detail else state.kind
        kind = f"{QUEUED}: {waiting[name]}" if name in waiting else kind
        cost = f"{hours[name]:.2f} h" if name in hours else "? h"
        lines += [
            f"{name:<{width}}  {kind:<28}  {cost:>9}",
            f"    {shlex.join([*starter(job), *command(state.run)])}",
        ]
    counts = Counter(QUEUED if state.run.name in waiting else state.kind for state in states)
    todo = [s for s in states if s.kind not in (FINISHED, CHANGED)]
    expected = [hours[s.run.name] for s in todo if s.run.name in hours]
    total = "cost unknown: --rate tells, or hours: in the sweep file"
    if expected or not todo:
        total = f"{sum(expected):.1f} hours to go"
    if expected and len(expected) < len(todo):
        total += f" (without {len(todo) - len(expected)} runs that nothing is known of)"
    if job is not None and job.gpus_per_node and expected:
        total += f", {sum(expected) * job.nodes * job.gpus_per_node:.1f} GPU hours"
    lines += [
        "",
        f"{sweep.name}: {len(states)} runs: " + ", ".join(f"{n} {kind}" for kind, n in counts.items()),
        total,
    ]
    return "\n".join([*lines, *([describe(job)] if job is not None else [])])


def starter(job: Job | None) -> list[str]:
    """Return the words before train.py that start all ranks of a run, in the shell of each of its nodes."""
    if job is None or job.world_size == 1:
        return ["python"]
    nodes = ["--nnodes", str(job.nodes), "--rdzv-backend", "c10d", "--rdzv-endpoint", "FIRST_NODE:29500"]
    return ["torchrun", *(nodes if job.nodes > 1 else []), "--nproc-per-node", str(job.ranks)]


def refuse_changed(sweep: Sweep, states: Sequence[State], acting: bool) -> None:
    """Refuse a run that exists with other settings, or only warn unless ``acting``; it is never continued,
    nor skipped as finished."""
    for state in states:
        if (other := state.change) is not None:
            was = f"was {other.before} when {state.folder} was made; delete that, or give the runs new names"
            name = f"{state.run.name}: {other.key}"
            error = ConfigError(name, other.now, f"{was}: --name {sweep.name}-2")
            if acting:
                raise error
            print(f"warning: {error}", file=sys.stderr)


def run_here(pool: Pool) -> int:
    tasks = pool.run(sys.stdout)
    counts = Counter(task.status for task in tasks)
    print(", ".join(f"{n} {status}" for status, n in counts.items()) or "nothing to do")
    print(failures(tasks), end="")
    return 75 if counts[STOPPED] else 0 if counts[FINISHED] == len(tasks) else 1


def hand_over(sweep: Sweep, todo: Sequence[State], job: Job, logs: Path) -> None:
    """Submit what is left."""
    if not todo:
        print("nothing to submit")
        return
    arrays = submit(job, sweep.name, [state.run for state in todo], logs)
    print(f"submitted job array {', '.join(arrays)}, {len(todo)} runs; logs: {logs}/<run>.<job>.out")


def print_scripts(job: Job, sweep: str, runs: Sequence[Run], logs: Path) -> None:
    """Print the script of every array that ``--submit`` would submit; one array if no Slurm can tell the
    largest size."""
    try:
        most = largest_array()
    except SlurmError:
        most = None
    arrays = parts(runs, most)
    if len(arrays) > 1:
        many = f"{len(runs)} runs are more than this cluster's MaxArraySize={most}"
        note = f"note: {len(arrays)} scripts follow: {many}; --submit hands them all over"
        print(note, file=sys.stderr)
    for part in arrays:
        print(script(job, sweep, part, logs), end="")


# -- cost: from finished runs, the sweep's file, or a dry run and a rate in tokens a second -----------


class EstimateError(StoppedError):
    """A dry run failed; the message is its last output."""


def hours_of(states: Sequence[State]) -> dict[str, float]:
    """Return run name -> expected hours, where known: the mean of its cell's finished runs, else the file's
    ``hours``."""
    measured: dict[str, list[float]] = {}
    for state in states:
        if state.kind == FINISHED:
            taken = numbers(read_object(state.folder / "summary.json").get("seconds"))
            measured.setdefault(state.run.cell, []).extend(seconds / 3600 for _, seconds in taken)
    expected = {
        state.run.name: fmean(hours) if (hours := measured.get(state.run.cell)) else state.run.hours
        for state in states
    }
    return {name: hours for name, hours in expected.items() if hours is not None}


def dry_run(state: State, *words: str) -> str:
    """Return what a dry run of train.py on a run's real data prints. Raises EstimateError."""
    line = [sys.executable, *command(state.run), "dry_run=true", *words]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=DRY_RUN_SECONDS)
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()[-5:]
        failed = f"{state.run.name}: the dry run failed (exit code {done.returncode}):"
        raise EstimateError("\n".join([failed, *lines]))
    return done.stdout


def print_memory(todo: Sequence[State], job: Job) -> None:
    """Print what a run of each cell would hold of the job's card, by part, or why it is refused. Raises
    ConfigError without a card."""
    require(bool(job.card), "slurm.card", None, f"is not known: --set card= one of {', '.join(CARDS)}")
    cells = {state.run.cell: state for state in reversed(todo)}
    for cell, state in progress(list(cells.items()), "dry runs (--memory)", unit="cell", delay=SOON):
        try:
            lines = dry_run(state, f"plan.card={job.card}", f"plan.ranks={job.world_size}").splitlines()
            first = next((i for i, line in enumerate(lines) if _SIZE.search(line)), 0)
            print(f"{cell}:", *lines[first:], sep="\n", flush=True)
        except EstimateError as error:
            print(error, flush=True)


def tokens_in(output: str) -> int | None:
    """Return the tokens of prompts and completions that a dry run names, all steps together, at most with
    rounds; None if it names none."""
    found = _TOKENS.search(output.replace(",", ""))
    return None if found is None else int(found[1])


def hours_at(tokens: int, per_second: float, job: Job) -> float:
    """Return the hours in which all ranks of a run train ``tokens``, each at ``per_second`` tokens a second.
    Sampling and evaluation come on top."""
    return tokens / (per_second * job.world_size) / 3600


if __name__ == "__main__":
    pulse()
    sys.exit(main())
