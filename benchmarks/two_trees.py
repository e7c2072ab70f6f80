"""One training step in two checkouts of this project, by turns: what a change does to its CPU time and to its
bits.

    git worktree add /tmp/before HEAD~1
    python -m benchmarks.two_trees /tmp/before          # DPO, cached reference scores, 8 pairs
    python -m benchmarks.two_trees /tmp/before --loss kto --variant k=1

Each checkout has a process of its own with one thread, and does the same step whenever it is its turn, so
that both see the same load. Page faults are the kernel's, for memory that the process had given back. Both
processes report the trained weights after their last step; the last line says whether all bits are the
same.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import resource
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.measure import ROOT, Sample, Spread, machine, ratio, table, timed
from benchmarks.offline_vs_humanline import settings_of
from benchmarks.parts import (
    KNOWN,
    LOSSES,
    benchmark_pairs,
    fresh,
    make_trainer,
    random_policy,
    score_all,
    segment,
    shape,
)
from models.distributed import local

WORKER = "worker"
WARM_UP = 3


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", type=Path, help="the other checkout's folder")
    parser.add_argument("--data", default="hh", help="hh, gsm8k, drawn, or PATH:FORMAT")
    parser.add_argument("--loss", default="dpo", choices=list(LOSSES))
    parser.add_argument("--variant", default="cached", help="cached, or k=1 and so on")
    parser.add_argument("--model", default="small")
    parser.add_argument("--batch-pairs", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--padded", action="store_true", help="model.packing=false")
    return parser.parse_args()


def data_here(data: str) -> str:
    """Return the name, or the path and format, by which both checkouts find the data that this one finds:
    each would look beside itself, and draw lengths where there are none."""
    path, format_ = KNOWN.get(data, (None, None))
    if path is None:
        return data
    return f"{path}:{format_}" if path.exists() else "drawn"


def worker() -> None:
    """Do one step for each line of the standard input, and report it as a line of JSON; report the weights
    when there is no more."""
    args = arguments()
    torch.set_num_threads(1)
    config = shape(args.model)
    pairs = benchmark_pairs(args.data, 2 * args.batch_pairs, config.vocab_size)
    settings = settings_of(args.variant, args.loss, args.batch_pairs, args.padded)
    plan = segment(settings, pairs, 2)
    trainer = make_trainer(settings, fresh(random_policy(config, torch.device("cpu"))))
    score_all(trainer, plan)
    start, known = trainer.state_dict(), dict(trainer.reference.scores)

    def step() -> None:
        trainer.load_state_dict(start, known)
        trainer.step(plan).pending.read()

    for _ in sys.stdin:
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        took = timed(step)
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
        print(json.dumps({"wall": took.wall, "cpu": took.cpu, "faults": faults}), flush=True)
    digest = hashlib.sha256()
    for parameter in trainer.policy.parameters():
        digest.update(local(parameter.detach()).numpy().tobytes())
    print(json.dumps({"weights": digest.hexdigest()}), flush=True)


@dataclass
class Tree:
    """A checkout and the process that works in it."""

    process: subprocess.Popen[str]
    samples: list[Sample]
    faults: list[int]

    @classmethod
    def started(cls, folder: Path, data: str) -> Tree:
        code = f"import runpy; runpy.run_path({str(Path(__file__).resolve())!r}, run_name={WORKER!r})"
        words = [*sys.argv[1:], "--data", data_here(data)]
        command = [sys.executable, "-c", code, *words]  # -c: modules come from the working folder
        pipe = subprocess.PIPE
        return cls(subprocess.Popen(command, cwd=folder, text=True, stdin=pipe, stdout=pipe), [], [])

    def step(self) -> None:
        assert self.process.stdin is not None
        print(file=self.process.stdin, flush=True)
        found = self.answer()
        self.samples.append(Sample(found["wall"], found["cpu"]))
        self.faults.append(found["faults"])

    def weights(self) -> str:
        """Return a digest of the weights, and end the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        found: str = self.answer()["weights"]
        self.process.wait()
        return found

    def answer(self) -> dict:
        """Return the process's next line of JSON; other lines are what the project prints."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                answer: dict = json.loads(line)
                return answer
        raise RuntimeError(f"the process ended with {self.process.wait()}")


def main() -> None:
    args = arguments()
    torch.set_num_threads(1)
    trees = {"before": Tree.started(args.before, args.data), "this": Tree.started(ROOT, args.data)}
    for i in range(WARM_UP + args.steps):
        for tree in list(trees.values())[:: 1 if i % 2 else -1]:
            tree.step()
    print(f"{machine()}\n{args.loss}, {args.variant}, {args.batch_pairs} pairs, padded {args.padded}\n")
    rows = []
    for name, tree in trees.items():
        cpu = Spread.of(1e3 * sample.cpu for sample in tree.samples[WARM_UP:])
        faults = Spread.of(tree.faults[WARM_UP:])
        rows.append([name, *(f"{s.median:,.0f} ({s.low:,.0f} to {s.high:,.0f})" for s in (cpu, faults))])
    print(table(["", "CPU ms a step", "page faults a step"], rows))
    before, this = (tree.samples[WARM_UP:] for tree in trees.values())
    same = len({tree.weights() for tree in trees.values()}) == 1
    verdict = "the weights are the same to the bit" if same else "the weights DIFFER"
    print(f"\nCPU time, before / this: {ratio(before, this)}; {verdict}")


if __name__ == WORKER:
    worker()
elif __name__ == "__main__":
    main()
