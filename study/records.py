"""The record of each run, one line with its settings, its results and their origin; the report is made from
these alone.

``runs.jsonl`` beside a report holds the records of its runs; a record is read from the run's own folder as
long as that exists.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from common.errors import ConfigError, require
from launch.collect import read_run
from launch.grid import Run, override

FACTS = "study.json"
SAMPLED, GREEDY = "eval_accuracy_sampled", "eval_accuracy_greedy"


@dataclass(frozen=True)
class Record:
    """A finished run."""

    name: str
    cell: str
    seed: int
    command: list[str]
    """The arguments of ``python train.py``."""
    before: dict[str, float]
    after: dict[str, float]
    """``eval_*`` of the initial weights (``before``) and of the trained weights (``after``). ``before`` also
    has ``train_logprob_chosen`` and ``train_logprob_rejected`` of the training rows under the initial
    weights, nats a token, if they were scored."""
    steps: int
    examples: int
    seconds: dict[str, float]
    """``train``: in steps; ``sample``: sampling and scoring; ``cpu``, ``wall``: of the whole run with its
    evaluations."""
    traces: dict[str, float] = field(default_factory=dict)
    """Mean over the last tenth of the steps of each of ``TRACES`` that a step logs: ``clipped_low``,
    ``grad_norm`` …"""
    curve: list[tuple[int, float]] = field(default_factory=list)
    """(examples trained on, sampled accuracy) of the evaluations during training; the first is before
    training."""
    clipped: float | None = None
    """Mean share of tokens that humanline clipped, over the whole run."""
    commit: str | None = None
    """This project's commit when the run began; None if it was not noted or is not known."""
    machine: dict[str, str] = field(default_factory=dict)
    """Processor, threads and versions that the run was made with; empty if they were not noted."""


TRACES = ("clipped_low", "clipped_high", "grad_norm", "loss", "kl", "reward_margin")


def finished(folder: Path) -> bool:
    """Whether a run is complete, with nothing left to do."""
    return (folder / "summary.json").exists() and (folder / FACTS).exists()


def read_record(run: Run, folder: Path) -> Record:
    """Return the record of a finished run, from its folder."""
    summary, facts = (json.loads((folder / name).read_text()) for name in ("summary.json", FACTS))
    lines = [line for line in read_run(folder, run.cell).lines if "loss" in line]
    rounds = [json.loads(path.read_text()) for path in sorted((folder / "rounds").glob("*/round.json"))]
    sampled = sum(
        r.get("metrics", {}).get("sample_seconds", 0.0) + r.get("metrics", {}).get("score_seconds", 0.0)
        for r in rounds
    )
    clipped = [(line.get("clipped_low") or 0.0) + (line.get("clipped_high") or 0.0) for line in lines]
    return Record(
        run.name,
        run.cell,
        run.seed,
        command(run),
        numbers(summary["before"]) | training_rows(folder / "data_report.json"),
        numbers(summary["after"]),
        summary["steps"],
        summary["examples"],
        {
            "train": summary["seconds"],
            "sample": sampled,
            "cpu": facts["cpu_seconds"],
            "wall": facts["wall_seconds"],
        },
        traces(lines[-max(1, len(lines) // 10) :]),
        [
            (seen, line["eval_accuracy_sampled"])
            for seen, line in zip([0, *(ln["examples"] for ln in lines)], lines, strict=False)
            if line.get("eval_accuracy_sampled") is not None
        ],
        _mean(clipped) if run.settings.get("humanline") else None,
        facts.get("commit"),
        facts.get("machine", {}),
    )


def training_rows(path: Path) -> dict[str, float]:
    """Return the mean token log-probability of a run's training rows, by side, from its data report."""
    sides = (json.loads(path.read_text()).get("logprob") or {}) if path.is_file() else {}
    return {
        f"train_logprob_{side}": sides[side]["mean"] for side in ("chosen", "rejected") if sides.get(side)
    }


def command(run: Run) -> list[str]:
    """Return the arguments of ``python train.py``, without the folders."""
    return [override(key, value) for key, value in (run.settings | {"seed": run.seed}).items()]


def traces(lines: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the mean over ``lines`` of each of ``TRACES`` that they have."""
    series = {key: [line[key] for line in lines if line.get(key) is not None] for key in TRACES}
    return {key: _mean(values) for key, values in series.items() if values}


def _mean(values: Iterable[float]) -> float:
    terms = list(values)
    return sum(terms) / len(terms)


def numbers(values: dict[str, Any]) -> dict[str, float]:
    return {key: value for key, value in values.items() if value is not None}


def collect(runs: Sequence[Run], runs_dir: Path, earlier: Path) -> list[Record]:
    """Return the records of those of ``runs`` that are finished, from their folders or else from the file
    ``earlier``, where a run with the same settings may have another name.

    Raises ConfigError if ``earlier`` has a run of this name with other settings.
    """
    records = list(read_records(earlier))
    named = {record.name: record for record in records}
    known = {frozenset(record.command): record for record in records}
    finished_records = []
    for run in runs:
        words = command(run)
        if finished(runs_dir / run.name):
            finished_records.append(read_record(run, runs_dir / run.name))
        elif (record := known.get(frozenset(words))) is not None:
            finished_records.append(replace(record, name=run.name, cell=run.cell))
        else:
            require(
                run.name not in named,
                "records",
                earlier,
                f"has {run.name} with other settings; run it again, or leave this file out",
            )
    return finished_records


def read_records(path: Path) -> Iterator[Record]:
    """Yield the records of a file. Raises ConfigError if there is no such file, or a line of it is not a
    record."""
    require(path.is_file(), "records", path, "is not a file")
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            raw = json.loads(line)
            yield Record(**raw | {"curve": [tuple(point) for point in raw["curve"]]})
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(
                "records", path, f"line {number} is no record of a run ({type(error).__name__}: {error})"
            ) from error


def append_record(path: Path, record: Record) -> None:
    """Add a line to the file, which need not exist, in one write: a process that is killed leaves no half "
    "line."""
    with path.open("ab", buffering=0) as file:
        file.write(line_of(record).encode())


def line_of(record: Record) -> str:
    return json.dumps({k: v for k, v in asdict(record).items() if k != "machine" or v}) + "\n"
