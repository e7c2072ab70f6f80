"""The cost of a sweep before it starts, from its finished runs, from its file, or from a dry run and a
rate."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from statistics import fmean

from launch.slurm import ROOT, Job, command
from launch.state import FINISHED, State

_PLAN = re.compile(r"([\d,]+) [a-z ]+, ([\d,]+) steps of")
DRY_RUN_SECONDS = 1800


class EstimateError(RuntimeError):
    """A dry run failed; the message is its last output."""


def hours_of(states: Sequence[State]) -> dict[str, float]:
    """Return run name -> expected hours, where known: the mean of its cell's finished runs, else the file's
    ``hours``."""
    measured: dict[str, list[float]] = {}
    for state in states:
        if state.kind == FINISHED:
            summary = json.loads((state.folder / "summary.json").read_text())
            measured.setdefault(state.run.cell, []).append(summary["seconds"] / 3600)
    known = {
        state.run.name: fmean(measured[state.run.cell]) if state.run.cell in measured else state.run.hours
        for state in states
    }
    return {name: hours for name, hours in known.items() if hours is not None}


def dry_run(state: State) -> tuple[int, int]:
    """Return (examples, steps) of a run, counted by train.py on its real data. Raises EstimateError."""
    words = [sys.executable, *command(state.run), "dry_run=true"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=DRY_RUN_SECONDS)
    found = _PLAN.search(done.stdout)
    if done.returncode or found is None:
        said = (done.stderr or done.stdout).strip().splitlines()[-5:]
        raise EstimateError(
            f"{state.run.name}: the dry run failed (exit code {done.returncode}):\n" + "\n".join(said)
        )
    examples, steps = (int(number.replace(",", "")) for number in found.groups())
    return examples, steps


def hours_at(examples: int, per_second: float, job: Job) -> float:
    """Return the hours that ``examples`` take with all ranks of a run, each at ``per_second`` examples per
    second."""
    return examples / (per_second * job.world_size) / 3600
