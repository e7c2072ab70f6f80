"""The study: a plan's runs that no record has yet, then its page.

    python -m study quick                # the four variants of each loss on both tasks, three seeds: minutes
    python -m study paper                # the paper's comparisons, study/paper.yaml; hours, the same command goes on where it was
    python -m study evidence             # study/evidence.yaml; days in the background, likewise
    python -m study evidence --report    # its page, of the records that there are
    python -m study quick --only stories --seeds 11,12,13 --name other-seeds
    python -m study mine.yaml            # a plan of one's own

A finished run becomes a line of results/<name>/runs.jsonl, beside the page, and its folder in runs/<name>/ is
deleted. Runs that are in there or in the plan's published records (docs/study) are not done again; quick
does all of its own.
"""  # noqa: E501

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from common.errors import ConfigError, StoppedError, require
from common.files import check_name
from common.options import options_of
from config.cli import answered
from study.plan import MAIN, PLANS, PUBLISHED, known, read_plan

QUICK, QUICK_SEEDS = "quick", (1, 2, 3)
MOVED = {
    "full": "python -m study paper",
    "report": "python -m study paper --report",
    "evidence-report": "python -m study evidence --report",
    "--task": "--only sums or --only stories",
    "--plan": "python -m study FILE",
}
"""Words of before -> what is written now."""


def main(words: Sequence[str] | None = None) -> int:
    return answered(lambda: act(list(sys.argv[1:] if words is None else words)))


def parser() -> argparse.ArgumentParser:
    about = options_of("python -m study", __doc__)
    about.add_argument("plan", metavar="PLAN", help=f"{QUICK}, {', '.join(PLANS)}, or a plan's file")
    about.add_argument("--report", action="store_true", help="run nothing, write the page")
    about.add_argument(
        "--only", default="", metavar="LIST", help="only these parts, tasks or blocks, as in main,k"
    )
    about.add_argument("--seeds", default="", metavar="LIST", help="instead of the plan's, as in 11,12,13")
    about.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="runs at a time, one core each")
    about.add_argument("--name", help="of the folders; the plan's if not given")
    about.add_argument("--runs-dir", type=Path, help="where runs lie; runs/<name> if not given")
    about.add_argument("--out", type=Path, help="where the page goes; results/<name> if not given")
    about.add_argument(
        "--records", type=Path, metavar="FILE", help="a runs.jsonl instead of the plan's published records"
    )
    return about


def act(words: Sequence[str]) -> None:
    """Do what is missing, and write the page. Raises ConfigError, StoppedError if runs failed."""
    for word in words:
        if (new := MOVED.get(word.partition("=")[0])) is not None:
            raise ConfigError("study", word, f"is written otherwise now: {new}")
    options = parser().parse_args(words)
    require(options.jobs >= 1, "--jobs", options.jobs, "must be at least 1")
    require(
        not (options.report and options.only), "--only", options.only, "chooses runs, and --report runs none"
    )
    quick = options.plan == QUICK
    file = PLANS.get("paper" if quick else options.plan) or Path(options.plan)
    plan = read_plan(file)
    name = options.name or Path(options.plan).stem
    check_name("--name", name)
    if quick:
        plan = plan.only([MAIN]).with_seeds(QUICK_SEEDS)
    wanted = plan.only(options.only.split(",")) if options.only else plan
    if seeds := seeds_of(options.seeds):
        plan = wanted = wanted.with_seeds(seeds)
    if options.records is not None:
        require(options.records.is_file(), "--records", options.records, "is not a file")
    files = [options.records] if options.records else PUBLISHED.get(options.plan, [])
    runs_dir, out = (options.runs_dir or Path("runs") / name).resolve(), options.out or Path("results") / name
    failed: list[str] = []
    if not options.report:
        from study.runner import run_plan

        failed = run_plan(wanted, runs_dir, out, files, options.jobs, partial(print, flush=True))
    from study.page import write_page  # imports matplotlib, which a wrong command line is spared

    print(write_page(options.plan, file, plan, known(plan, runs_dir, [*files, out / "runs.jsonl"]), out))
    if failed:
        raise StoppedError(
            f"failed: {', '.join(failed)}; logs in {runs_dir}/logs. The same command tries again"
        )


def seeds_of(text: str) -> list[int]:
    """Return the seeds of a comma-separated list; none of an empty text. Raises ConfigError."""
    if not text:
        return []
    digits = all(word.strip().isdigit() for word in text.split(","))
    require(digits, "--seeds", text, "must be whole numbers, as in 11,12,13")
    seeds = [int(word) for word in text.split(",")]
    require(
        len(set(seeds)) == len(seeds), "--seeds", text, "names a seed twice: runs of one seed are one run"
    )
    return seeds


if __name__ == "__main__":
    sys.exit(main())
