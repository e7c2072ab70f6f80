"""One step's cost as the vocabulary, the length and the batch grow, with a process for each cell so that its
memory is its own.

    python -m benchmarks.scaling
    python -m benchmarks.scaling --vocabularies 32768 65536 131072 262144 --lengths 512 1024 2048 4096 8192

``MiB beyond the weights`` is the step's memory without weights, gradients and optimizer state (16 bytes a
weight), which grow with the vocabulary in any implementation. It must not grow with the vocabulary.
"""

from __future__ import annotations

import argparse
import json

import torch

from benchmarks.measure import in_fresh_process, machine, peak_rss, rss, table, timed
from benchmarks.parts import (
    Settings,
    fixed_pairs,
    llama,
    make_trainer,
    random_policy,
    score_all,
    segment,
    train,
)


def cell(vocabulary: int, length: int, pairs: int, micro: int) -> dict[str, float]:
    """Measure one warm DPO step in this process: CPU and wall seconds, peak MiB, and the part of the peak
    beyond weights, gradients and moments."""
    base = rss()
    policy = random_policy(llama(vocabulary, 128, 2, 4, 2, 256, 16384), torch.device("cpu"))
    weights = sum(p.numel() for p in policy.parameters())
    settings = Settings("dpo", pairs, micro, max_length=16384)
    plan = segment(settings, fixed_pairs(pairs, vocabulary, length, length // 2))
    trainer = make_trainer(settings, policy)
    score_all(trainer, plan)
    sample = timed(lambda: train(trainer, plan))
    taken = peak_rss() - base
    return {
        "cpu": sample.cpu,
        "wall": sample.wall,
        "peak": taken / 2**20,
        "beyond": (taken - 16 * weights) / 2**20,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vocabularies", type=int, nargs="*", default=[32768, 65536, 131072, 262144])
    parser.add_argument("--lengths", type=int, nargs="*", default=[512, 1024, 2048, 4096])
    parser.add_argument(
        "--batches", type=int, nargs="*", default=[2, 4, 8], help="pairs in a step, two at once"
    )
    parser.add_argument(
        "--cell",
        type=int,
        nargs=4,
        help="vocabulary, length, pairs, pairs at once: one cell, in this process",
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.cell:
        print(json.dumps(cell(*args.cell)))
        return
    plans = {
        "vocabulary": [(v, 256, 2, 2) for v in args.vocabularies],
        "length": [(32768, n, 1, 1) for n in args.lengths],
        "batch (2 at once)": [(32768, 256, b, 2) for b in args.batches],
    }
    print(machine() + "\n")
    for what, cells in plans.items():
        rows = []
        for one in cells:
            found = in_fresh_process("benchmarks.scaling", "--cell", *map(str, one))
            rows.append(
                [
                    *(f"{n:,}" for n in one[:3]),
                    f"{found['cpu']:.2f}",
                    f"{found['peak']:.0f}",
                    f"{found['beyond']:.0f}",
                ]
            )
        head = ["vocabulary", "length", "pairs", "CPU s a step", "peak MiB", "MiB beyond the weights"]
        print(f"{what}\n\n{table(head, rows)}\n", flush=True)


if __name__ == "__main__":
    main()
