"""The cost of a sweep before it starts, from its finished runs, from its file, or from a dry run and a rate
in tokens a second."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from common.errors import StoppedError
from config.schema import CARDS
from launch.collect import read_json
from launch.slurm import ROOT, Job, command
from launch.state import State
from reports.metrics import numbers
from reports.outcome import FINISHED

_TOKENS = re.compile(r"(\d+) tokens to train on")
_SIZE = re.compile(r"([\d.]+) M parameters")
DRY_RUN_SECONDS = 1800
SHARE_OF_PEAK = 0.3
OPERATIONS = 8
"""Operations on each weight for a token: 2 in the forward, 4 in the backward, 2 in the reference's."""


class EstimateError(StoppedError):
    """A dry run failed; the message is its last output."""


def hours_of(states: Sequence[State]) -> dict[str, float]:
    """Return run name -> expected hours, where known: the mean of its cell's finished runs, else the file's
    ``hours``."""
    measured: dict[str, list[float]] = {}
    for state in states:
        if state.kind == FINISHED:
            taken = numbers(read_json(state.folder / "summary.json").get("seconds"))
            measured.setdefault(state.run.cell, []).extend(seconds / 3600 for _, seconds in taken)
    expected = {
        state.run.name: fmean(hours) if (hours := measured.get(state.run.cell)) else state.run.hours
        for state in states
    }
    return {name: hours for name, hours in expected.items() if hours is not None}


@dataclass(frozen=True)
class Size:
    """What a dry run says of a run. ``tokens``: of prompts and completions, all steps together, at most with
    rounds. ``parameters``: the model's; 0 where the memory could not be planned."""

    tokens: int
    parameters: float


def dry_run(state: State) -> Size:
    """Return a run's size, counted by train.py on its real data. Raises EstimateError."""
    words = [sys.executable, *command(state.run), "dry_run=true"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=DRY_RUN_SECONDS)
    if done.returncode or (size := size_in(done.stdout)) is None:
        lines = (done.stderr or done.stdout).strip().splitlines()[-5:]
        failed = f"{state.run.name}: the dry run failed (exit code {done.returncode}):"
        raise EstimateError("\n".join([failed, *lines]))
    return size


def size_in(output: str) -> Size | None:
    """Return the Size that the output of a dry run names, or None."""
    tokens, parameters = (part.search(output.replace(",", "")) for part in (_TOKENS, _SIZE))
    if tokens is None:
        return None
    return Size(int(tokens[1]), float(parameters[1]) * 1e6 if parameters else 0.0)


def usual_rate(parameters: float, card: str) -> float:
    """Return the tokens a second that a rank on ``card`` trains at SHARE_OF_PEAK of its peak. Raises
    EstimateError for a model of unknown size."""
    if not parameters:
        raise EstimateError("the dry run does not say how large the model is: --rate R, in tokens a second")
    return SHARE_OF_PEAK * CARDS[card][1] / (OPERATIONS * parameters)


def hours_at(tokens: int, per_second: float, job: Job) -> float:
    """Return the hours in which all ranks of a run train ``tokens``, each at ``per_second`` tokens a second.
    Sampling and evaluation come on top."""
    return tokens / (per_second * job.world_size) / 3600
