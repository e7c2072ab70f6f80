"""How evenly a batch's tokens are spread over ranks, with packed rows dealt by length, as padded ones are,
against dealt by tokens. Only lengths are computed, no model runs.

    python -m benchmarks.balance                       # embedded pairs, drawn pairs, real ones where they are
    python -m benchmarks.balance --data hh PATH:FORMAT --ranks 8 64 --shapes 4x1 4x2

Every number is the share of a step in which ranks do not wait for each other: the mean load over ranks,
summed over turns, divided by the largest load, summed over turns. A shape is examples per rank and turn x
turns.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from benchmarks.floor import forward
from benchmarks.measure import ROOT, machine, table
from benchmarks.parts import KNOWN, benchmark_pairs, drawn_pairs, shape
from data.balance import example_tokens
from data.batches import deal
from data.types import Example

Turns = list[list[list[Example]]]
DATA = ("adder", "hh", "gsm8k", "drawn")
SINGLE = ("gsm8k",)
"""Formats whose rows stand alone (for GRPO and KTO); in other formats an example is a pair."""
COMPUTED = shape("qwen2.5-1.5b")
"""The architecture whose operations are counted."""


@dataclass(frozen=True)
class Balance:
    """Means over batches. The evenness in tokens and in operations, dealt by length (before) and by tokens
    (after), and the seconds to deal a batch by tokens."""

    tokens_before: float
    tokens_after: float
    operations_before: float
    operations_after: float
    seconds: float


def examples(data: str, count: int, longest: int) -> list[Example]:
    """Return the first ``count`` examples of ``data``. ``drawn``: pairs about as long as UltraFeedback's."""
    if data == "drawn":
        pairs = drawn_pairs(count, 8192, prompt=150.0, completion=280.0, longest=longest)
    else:
        path = f"{ROOT / 'assets' / 'adder' / 'pairs.jsonl'}:groups" if data == "adder" else data
        pairs = benchmark_pairs(path, count, 8192, longest)
    if data.rpartition(":")[2] in SINGLE:
        return [Example(f"p{i}", (chosen,)) for i, (chosen, _) in enumerate(pairs)]
    return [Example(f"p{i}", pair) for i, pair in enumerate(pairs)]


def evenness(turns: Turns, cost: Callable[[Example], float]) -> float:
    """Return the mean load over ranks, summed over turns, divided by the largest load, summed over turns; 1
    if no rank waits."""
    loads = np.array([[sum(map(cost, part)) for part in turn] for turn in turns])
    return float(loads.mean(axis=1).sum() / loads.max(axis=1).sum())


def operations(example: Example) -> float:
    return forward(COMPUTED, example.rows).training


def measure(found: list[Example], ranks: int, size: int, turns: int, batches: int) -> Balance:
    """Measure ``batches`` batches drawn from ``found``; each has as many examples as fill every rank in every
    turn."""
    rng, count = np.random.default_rng(0), ranks * size * turns
    rows = []
    for _ in range(batches):
        batch = [found[i] for i in rng.choice(len(found), count, replace=count > len(found))]
        width = len(batch[0].rows)
        before = deal(batch, ranks, size, width, packed=False)
        started = time.perf_counter()
        after = deal(batch, ranks, size, width, packed=True)
        seconds = time.perf_counter() - started
        rows.append(
            [evenness(of, cost) for cost in (example_tokens, operations) for of in (before, after)]
            + [seconds]
        )
    return Balance(*np.mean(rows, axis=0).tolist())


def report(
    found: dict[str, list[Example]], ranks: list[int], shapes: list[tuple[int, int]], batches: int
) -> str:
    """Return a table for each data set, with a row for each number of ranks: the evenness in tokens before ->
    after for each shape, then the evenness in operations after."""
    parts = []
    for name, of in found.items():
        tokens = [example_tokens(example) for example in of]
        header = ["ranks", *(f"{size} x {turns}" for size, turns in shapes), "operations", "ms to deal"]
        lines = []
        for n in ranks:
            rows = [measure(of, n, size, turns, batches) for size, turns in shapes]
            lines.append(
                [
                    str(n),
                    *(f"{row.tokens_before:.2f} -> {row.tokens_after:.3f}" for row in rows),
                    ", ".join(f"{row.operations_after:.3f}" for row in rows),
                    ", ".join(f"{1000 * row.seconds:.1f}" for row in rows),
                ]
            )
        kind = "pairs" if len(of[0].rows) == 2 else "sequences"
        about = f"median {np.median(tokens):.0f}, longest {max(tokens)} tokens"
        parts.append(f"{name}: {len(of)} {kind}, {about}\n\n{table(header, lines)}")
    return "\n\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", nargs="+", default=list(DATA), help="adder, hh, gsm8k, drawn, PATH:FORMAT")
    parser.add_argument("--examples", type=int, default=2048, help="how many of each are read")
    parser.add_argument("--longest", type=int, default=2048, help="rows are cut at this many tokens")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 16, 32, 64])
    parser.add_argument("--shapes", nargs="+", default=["4x1", "8x1", "2x4", "4x2"])
    parser.add_argument("--batches", type=int, default=20)
    args = parser.parse_args()
    shapes = [(int(size), int(turns)) for size, turns in (text.split("x") for text in args.shapes)]
    there = [data for data in args.data if data not in KNOWN or KNOWN[data][0].exists()]
    found = {data: examples(data, args.examples, args.longest) for data in there}
    print(f"{machine()}\n{args.batches} batches a number\n")
    print(report(found, args.ranks, shapes, args.batches))


if __name__ == "__main__":
    main()
