"""A named set of evaluations of finished runs, and their average, as a step of a sweep.

    python -m launch.suite halos runs/mine              # what of the suite this run lacks, then the average
    python -m launch.suite halos runs/table3-* --print  # the commands alone
    python -m launch.suite mine.yaml runs/mine          # a suite of your own, as launch/suites/halos.yaml is

A sweep file with ``suite: halos`` does it after each run (launch/grid.py). Each evaluation is an ``eval.py``
of its own, and one whose result is there is not done again. The average is evals/<suite>.json, a column of
``launch.results``. Exit codes: 0 all is there; 1 an evaluation failed; 2 the suite is not valid.
"""

from __future__ import annotations

import json
import math
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import require
from common.files import check_name, write_whole
from common.options import options_of
from config.cli import answered
from launch.collect import read_run
from launch.grid import read_yaml
from launch.slurm import ROOT

SUITES = Path(__file__).parent / "suites"


@dataclass(frozen=True)
class Suite:
    """A suite file, read."""

    name: str
    evaluations: Mapping[str, tuple[str, ...]]
    """name of a result -> the words of eval.py that make it"""
    average: Mapping[str, float]
    """column of launch.results -> the factor by which it counts in the mean"""

    def mean(self, values: Mapping[str, float]) -> float | None:
        """Return the mean over the columns, each times its factor; None where one is missing."""
        if not all(column in values for column in self.average):
            return None
        return math.fsum(by * values[column] for column, by in self.average.items()) / len(self.average)


def read_suite(named: str) -> Suite:
    """Return the suite of this name, or in this yaml file. Raises ConfigError."""
    own = Path(named).suffix in (".yaml", ".yml")
    path = Path(named) if own else SUITES / f"{named}.yaml"
    known = ", ".join(sorted(file.stem for file in SUITES.glob("*.yaml")))
    parts = read_yaml("suite", path, f"is no suite; there is {known}, or give a yaml file", resolve=False)
    commands: Any = parts.get("evaluations")
    average: Any = parts.get("average")
    good = set(parts) == {"evaluations", "average"}
    good = good and all(isinstance(part, dict) and part for part in (commands, average))
    require(good, "suite", path, "has evaluations and average, as halos.yaml, and no more")
    for name, words in commands.items():
        check_name("suite.evaluations", str(name))
        texts = isinstance(words, list) and all(isinstance(word, str) and "=" in word for word in words)
        said = "is a list of words of eval.py, as [kind=accuracy]"
        require(texts, f"suite.evaluations.{name}", words, said)
    for column, by in average.items():
        evaluation = str(column).partition("/")[0]
        is_number = type(by) in (int, float) and math.isfinite(by)
        require(is_number, f"suite.average.{column}", by, "must be a number, by which the column counts")
        require(
            evaluation in commands,
            "suite.average",
            column,
            f"is NAME/metric, NAME one of {', '.join(commands)}",
        )
    return Suite(path.stem, {str(name): tuple(words) for name, words in commands.items()}, average)


def commands(suite: Suite, run: Path) -> list[list[str]]:
    """Return the commands that make what the run lacks, as words after ``python``."""
    return [
        ["eval.py", f"run={run}", f"name={name}", *words]
        for name, words in suite.evaluations.items()
        if not (run / "evals" / f"{name}.json").exists()
    ]


def measure(suite: Suite, run: Path) -> bool:
    """Do what the run lacks of the suite, and write the average. Returns whether all of it is there."""
    failed = [words for words in commands(suite, run) if subprocess.call([sys.executable, *words], cwd=ROOT)]
    for words in failed:
        print(f"{run.name}: failed: python {shlex.join(words)}", file=sys.stderr)
    if failed:
        return False
    mean = suite.mean(read_run(run).values)
    if mean is None:
        missing = [column for column in suite.average if column not in read_run(run).values]
        print(f"{run.name}: no average of {suite.name}: there is no {', '.join(missing)}", file=sys.stderr)
        return False
    said = {"average": mean, "settings": {"average": dict(suite.average)}}
    write_whole(run / "evals" / f"{suite.name}.json", json.dumps(said, indent=2) + "\n")
    print(f"{run.name}: {suite.name} {mean:.2f}", flush=True)
    return True


def measure_all(suite: Suite, runs: Sequence[Path]) -> int:
    """``measure`` each run, also after one has failed. Returns the exit code."""
    there = [measure(suite, run) for run in runs]
    return 0 if all(there) else 1


def main(words: Sequence[str] | None = None) -> int:
    about = options_of("python -m launch.suite", __doc__)
    about.add_argument("suite", help="a file of launch/suites, or a yaml file of your own")
    about.add_argument("runs", nargs="+", type=Path, help="folders of finished runs")
    about.add_argument("--print", action="store_true", dest="shown", help="print the commands alone")
    options = about.parse_args(words)

    def work() -> int:
        suite = read_suite(options.suite)
        for run in options.runs:
            done = (run / "summary.json").exists()
            require(done, "runs", run, "is no finished run: a suite measures runs that have ended")
        if not options.shown:
            return measure_all(suite, [run.resolve() for run in options.runs])
        for run in options.runs:
            for made in commands(suite, run):
                print(f"python {shlex.join(made)}")
        return 0

    return answered(work)


if __name__ == "__main__":
    sys.exit(main())
