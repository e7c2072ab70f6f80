"""The same global batches on one rank and on several (gloo, sharded, one thread each), to measure the cost
and gain of dealing them out.

    python -m benchmarks.ranks                 # 1 and 2 ranks, DPO, humanline at k = 1
    python -m benchmarks.ranks --ranks 1 2 4 --rounds 5

Each measurement is a separate start; the numbers of ranks take turns. CPU seconds are those of all ranks:
they show what communication and sharding add to the same work. Wall seconds show the speed-up only if every
rank has a core of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys

import torch

from benchmarks.measure import ROOT, Sample, machine, ratio, table, timed
from benchmarks.parts import (
    Settings,
    Stepper,
    benchmark_pairs,
    make_trainer,
    random_policy,
    score_all,
    segment,
    shape,
)
from models.distributed import barrier, gather_objects, start

WARM_UP = 2


def measure(model: str, data: str, steps: int, batch_pairs: int, micro_pairs: int) -> Sample:
    """Return the wall seconds of the slowest rank and the CPU seconds of all ranks for ``steps`` steps on
    this process's share of each batch. Every rank calls it."""
    world, config = start(), shape(model)
    settings = Settings(
        "dpo", batch_pairs, micro_pairs * world.size, humanline=True
    )  # ``micro_pairs`` at once on each rank
    plan = segment(settings, benchmark_pairs(data, batch_pairs * (WARM_UP + steps), config.vocab_size))
    trainer = make_trainer(settings, random_policy(config, world.device), world)
    score_all(trainer, plan)
    step = Stepper(trainer, plan)
    for _ in range(WARM_UP):
        step()
    barrier()
    samples = gather_objects(timed(lambda: [step() for _ in range(steps)]))
    return Sample(max(s.wall for s in samples), sum(s.cpu for s in samples))


def started(ranks: int, arguments: list[str]) -> Sample:
    """Return ``measure`` on ``ranks`` ranks in processes of their own. If they fail, raises RuntimeError with
    the end of their output."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
        "-m",
        "benchmarks.ranks",
        "--worker",
        *arguments,
    ]
    done = subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return Sample(**json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{"))))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--model", default="small")
    parser.add_argument("--data", default="hh", help="hh, gsm8k, drawn, or PATH:FORMAT")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--batch-pairs", type=int, default=8)
    parser.add_argument("--micro-pairs", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--worker", action="store_true", help="be one of the ranks (used by this command)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.worker:
        sample = measure(args.model, args.data, args.steps, args.batch_pairs, args.micro_pairs)
        if torch.distributed.get_rank() == 0:
            print(json.dumps(vars(sample)), flush=True)
        return
    arguments = [
        f"--{k}={getattr(args, k.replace('-', '_'))}"
        for k in ("model", "data", "steps", "batch-pairs", "micro-pairs")
    ]
    samples: dict[int, list[Sample]] = {n: [] for n in args.ranks}
    for i in range(args.rounds):
        for n in args.ranks if i % 2 == 0 else reversed(args.ranks):
            samples[n].append(started(n, arguments))
    first = samples[args.ranks[0]]
    print(
        f"{machine()}\n{args.steps} steps of {args.batch_pairs} pairs, {args.micro_pairs} at once on a "
        f"rank, {args.rounds} rounds\n"
    )
    print(
        table(
            [
                "ranks",
                "wall s, least",
                "CPU s of all ranks, least",
                f"wall: this / {args.ranks[0]}",
                f"CPU: this / {args.ranks[0]}",
            ],
            [
                [
                    str(n),
                    f"{min(s.wall for s in of):.2f}",
                    f"{min(s.cpu for s in of):.2f}",
                    str(ratio(of, first, "wall")),
                    str(ratio(of, first)),
                ]
                for n, of in samples.items()
            ],
        )
    )


if __name__ == "__main__":
    main()
