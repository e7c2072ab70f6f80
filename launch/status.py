"""The state of each run of a sweep, from its file or from run folders, and the number of runs in each state.

    python -m launch.status sweeps/adder.yaml

For a failed run it shows the last message and its log.
"""

from __future__ import annotations

if not __package__:  # started by its path, where nothing beside its folder is found
    raise SystemExit("error: type python -m launch.status")

import argparse
import sys
from collections import Counter
from collections.abc import Sequence

from config.cli import answered
from launch.results import load, options_of_runs


def main(words: Sequence[str] | None = None) -> int:
    about = options_of_runs("python -m launch.status", __doc__)
    options = about.parse_args(words, argparse.Namespace(select=""))

    def work() -> None:
        runs = load(options)[0]
        width = max((len(run.name) for run in runs), default=0)
        for run in runs:
            print(f"{run.name:{width}}  {run.about}")
        counts = Counter(run.status for run in runs)
        print(f"{len(runs)} runs: " + ", ".join(f"{n} {kind}" for kind, n in counts.items()))

    return answered(work)


if __name__ == "__main__":
    sys.exit(main())
