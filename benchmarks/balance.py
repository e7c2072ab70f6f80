"""How evenly a batch's operations are spread over ranks, with packed rows dealt by length, as padded ones
are, against dealt by what they cost. Only lengths are computed, no model runs.

    python -m benchmarks.balance                       # drawn lengths, embedded pairs, real ones if there
    python -m benchmarks.balance --data hh PATH:FORMAT --losses dpo --ranks 8 64 --shapes 4x1 16384tx4

A number is the share of a step in which ranks do not wait for each other: the mean load over ranks, summed
over slots, divided by the largest load, summed over slots; beside it what the longest example allows. A shape
is examples per rank and slot, or tokens (16384t), x slots. Where GRPO's prompts are shared, the time of a
step is given relative to one in which they are not.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import product

import numpy as np

from benchmarks.measure import ROOT, machine, table
from benchmarks.parts import KNOWN, Pair, benchmark_pairs, shape
from common.options import options_of
from data.balance import Work
from data.batches import Tokens, deal
from data.types import Example, Sequence
from data.views import mismatched

Slots = list[list[list[Example]]]
COMPUTED = shape("qwen2.5-1.5b")
"""The architecture whose operations are counted, in a humanline step."""
DRAWN = ("log-normal", "heavy", "bimodal")
DATA = ("adder", "hh", "gsm8k", *DRAWN)
LOSSES = {"dpo": 2, "kto": 1, "grpo": 1, "grpo shared": 1}
"""loss -> rows of an example."""
GROUP = 8
"""Answers to a prompt in GRPO."""


@dataclass(frozen=True)
class Balance:
    """Means over batches."""

    before: float
    """the evenness of operations where rows are dealt by length, as padded ones are"""
    after: float
    """where they are dealt by their operations"""
    possible: float
    """the most that the longest example allows beside the shortest others"""
    time: float
    """the time of a step relative to one without shared prompts (1 where none are shared)"""
    slots: float
    seconds: float
    """CPU time to deal a batch"""


def lengths(kind: str, count: int, longest: int, rng: np.random.Generator) -> np.ndarray:
    """Return completions' lengths: log-normal, Pareto with exponent 1.2, or three in ten far longer."""
    drawn = {
        "log-normal": lambda: 280 * np.exp(0.8 * rng.standard_normal(count)),
        "heavy": lambda: 120 * (1 + rng.pareto(1.2, count)),
        "bimodal": lambda: np.where(rng.random(count) < 0.7, 200, 2000)
        * np.exp(0.3 * rng.standard_normal(count)),
    }[kind]()
    return np.clip(drawn, 1, longest).astype(int)


def pairs_of(data: str, count: int, longest: int) -> list[Pair]:
    """Return ``count`` pairs of rows of ``data``: of this kind of length, or real ones."""
    if data not in DRAWN:
        path = f"{ROOT / 'assets' / 'adder' / 'pairs.jsonl'}:groups" if data == "adder" else data
        return benchmark_pairs(path, count, 8192, longest)
    rng = np.random.default_rng(0)
    prompts = np.clip(150 * np.exp(0.6 * rng.standard_normal(count)), 1, longest // 4).astype(int)
    answers = lengths(data, 2 * count, longest - longest // 4, rng)
    return [
        (row(i, p, a), row(i, p, b))
        for i, (p, a, b) in enumerate(zip(prompts, answers[:count], answers[count:], strict=True))
    ]


def row(prompt: int, p: int, c: int) -> Sequence:
    return Sequence(np.full(p, prompt, np.int32), np.zeros(c, np.int32))


def batch_of(
    pairs: list[Pair], loss: str, count: int, longest: int, rng: np.random.Generator
) -> list[Example]:
    """Return a batch of ``count`` examples of the loss. A group's answers are those of as many pairs."""
    drawn = [pairs[i] for i in rng.choice(len(pairs), count, replace=count > len(pairs))]
    if loss == "dpo":
        return [Example(f"p{i}", pair) for i, pair in enumerate(drawn)]
    if loss == "kto":
        return mismatched([Example(f"p{i}", pair[:1]) for i, pair in enumerate(drawn)], longest)
    rows = []
    for i, (answer, _) in enumerate(drawn):
        prompt = drawn[i - i % GROUP][0].prompt_ids
        rows.append(Sequence(prompt, answer.completion_ids[: longest - len(prompt)]))
    return [Example(f"p{i // GROUP}", (own,)) for i, own in enumerate(rows)]


def busy(slots: Slots, work: Work, shared: bool) -> tuple[float, float]:
    """Return (the mean load over ranks, summed over slots, divided by the largest load, summed over slots;
    the latter). The first is 1 if no rank waits."""
    loads = np.array([[work.part(part, shared) for part in slot] for slot in slots], float)
    return float(loads.mean(axis=1).sum() / loads.max(axis=1).sum()), float(loads.max(axis=1).sum())


def allowed(costs: list[int], ranks: int, size: int | Tokens) -> float:
    """Return the most even that a batch of these ``costs``, in ascending order, can be: the rank that has the
    longest example has the shortest others beside it, and the others of its slot at most the longest."""
    mean = most = sum(costs) / ranks
    longest = costs[-1]
    if isinstance(size, int):
        longest, most = longest + sum(costs[: size - 1]), sum(costs[-ranks * size :]) / ranks
    return mean / (mean + max(0.0, longest - most))


def measure(
    pairs: list[Pair], loss: str, ranks: int, size: int | Tokens, slots: int, longest: int, batches: int
) -> Balance:
    """Measure ``batches`` batches drawn from ``pairs``, each of as many examples as fill every rank in every
    slot; of ``slots`` times 8 a rank where ``size`` counts tokens."""
    rng, measurements = np.random.default_rng(0), []
    work, shared, width = Work.of(COMPUTED, other=1 / 2), loss.endswith("shared"), LOSSES[loss]
    each = slots * (8 if isinstance(size, Tokens) else size)
    for _ in range(batches):
        batch = batch_of(pairs, loss, ranks * each, longest, rng)
        before = deal(batch, ranks, size, width, packed=False) if isinstance(size, int) else None
        apart = deal(batch, ranks, size, width, work=work)
        started = time.process_time()
        after = deal(batch, ranks, size, width, shared=shared, work=work)
        seconds = time.process_time() - started
        even, took = busy(after, work, shared)
        possible = allowed(sorted(work.part([example]) for example in batch), ranks, size)
        old = np.nan if before is None else busy(before, work, False)[0]
        measurements.append([old, even, possible, took / busy(apart, work, False)[1], len(after), seconds])
    return Balance(*np.mean(measurements, axis=0).tolist())


def report(
    datasets: dict[str, list[Pair]],
    losses: list[str],
    ranks: list[int],
    shapes: list[str],
    longest: int,
    batches: int,
) -> str:
    """Return a table for each data set and loss, with a row for each number of ranks."""
    parts = []
    for (name, pairs), loss in product(datasets.items(), losses):
        lines = []
        for n in ranks:
            rows = [measure(pairs, loss, n, *sized(shape), longest, batches) for shape in shapes]
            cells = [
                f"{r.before:.2f} -> {r.after:.3f} of {r.possible:.2f}"
                + f", {r.time:.2f} x" * loss.endswith("shared")
                for r in rows
            ]
            lines.append([str(n), *cells, ", ".join(f"{r.slots:.1f}" for r in rows)])
            lines[-1].append(", ".join(f"{1000 * r.seconds:.0f}" for r in rows))
        header = ["ranks", *shapes, "slots", "ms to deal"]
        parts.append(f"{name}, {loss}: {len(pairs)} prompts\n\n{table(header, lines)}")
    return "\n\n".join(parts)


def sized(shape: str) -> tuple[int | Tokens, int]:
    """Return (size of a microbatch, slots) of ``8x1``, or of ``16384tx4``: at most so many tokens."""
    size, _, slots = shape.partition("x")
    return (Tokens(int(size[:-1])) if size.endswith("t") else int(size)), int(slots)


def main() -> None:
    parser = options_of("python -m benchmarks.balance", __doc__)
    parser.add_argument("--data", nargs="+", default=list(DATA), help=f"{', '.join(DATA)}, PATH:FORMAT")
    parser.add_argument("--losses", nargs="+", default=list(LOSSES), choices=list(LOSSES))
    parser.add_argument("--examples", type=int, default=2048, help="how many of each are read")
    parser.add_argument("--longest", type=int, default=4096, help="rows are cut at this many tokens")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 16, 32, 64])
    parser.add_argument("--shapes", nargs="+", default=["8x1", "4x2", "16384tx4"])
    parser.add_argument("--batches", type=int, default=5)
    args = parser.parse_args()
    there = [data for data in args.data if data not in KNOWN or KNOWN[data][0].exists()]
    datasets = {data: pairs_of(data, args.examples, args.longest) for data in there}
    print(f"{machine()}\n{args.batches} batches a number\n")
    print(report(datasets, args.losses, args.ranks, args.shapes, args.longest, args.batches))


if __name__ == "__main__":
    main()
