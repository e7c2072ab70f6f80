"""Seconds that training waits for a checkpoint, written in the foreground against in the background
(``async_save``), in turn.

    python -m benchmarks.checkpoints                       # 48 M float32 weights, AdamW: 0.6 GB
    python -m benchmarks.checkpoints --layers 16 --width 1024

``waits`` is ``Checkpoints.save`` as a run calls it; ``whole`` is the time until the checkpoint is complete.
Nothing else runs meanwhile, so the slowdown of a step by the writing thread is not included.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import torch

from benchmarks.measure import Spread, machine, table
from benchmarks.parts import policy_of_size, size_parser
from models.checkpoint import Checkpoints
from models.distributed import start

WAYS = {"async_save=false": False, "async_save=true": True}


def main() -> None:
    parser = size_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    world = start()
    policy = policy_of_size(args, world.device)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-6, fused=True)
    for parameter in policy.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    size = 3 * sum(parameter.numel() * parameter.element_size() for parameter in policy.parameters())
    print(f"{machine()}\n{size / 1e9:.2f} GB a checkpoint\n")
    timings: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        kept = {way: Checkpoints(Path(folder) / way, world, 2, behind) for way, behind in WAYS.items()}
        for step in range(args.rounds + 1):  # the first round does not count
            for way, checkpoints in kept.items():
                begun = time.perf_counter()
                checkpoints.save(step, policy, optimizer, {}, {})
                waited = time.perf_counter() - begun
                checkpoints.finish()
                timings[way].append((waited, time.perf_counter() - begun))
    rows = [
        [way, *(str(Spread.of(column)) for column in zip(*times[1:], strict=True))]
        for way, times in timings.items()
    ]
    print(table(["", "waits, s", "whole, s"], rows))


if __name__ == "__main__":
    main()
