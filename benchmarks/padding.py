"""Our batches against padding every row to the maximum length, as HALOs does, with the same trainer and
another collation.

    python -m benchmarks.padding            # rows of a quarter of the maximum on average
    python -m benchmarks.padding --data hh

Variants: ``to max``; ``padded`` (model.packing=false: rows are dealt by length and padded to the longest row
of a microbatch); ``packed`` (the default: no padding).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence as Seq
from functools import partial
from unittest.mock import patch

import numpy as np
import torch

import data.batches
from benchmarks.measure import Sample, Work, alternate, machine, ratio, table
from benchmarks.parts import (
    Pair,
    Settings,
    Stepper,
    benchmark_pairs,
    fresh,
    make_trainer,
    random_policy,
    score_all,
    segment,
    shape,
)
from data.batches import collate
from data.types import Sequence, Sequences
from models.policy import Policy

VARIANTS = ("to max", "padded", "packed")


def collate_to(
    longest: int, rows: Seq[Sequence], device: torch.device, pack: bool = False, share: bool = False
) -> Sequences:
    """Return ``data.batches.collate`` with every row padded to ``longest`` tokens: a grid of exactly that
    width, on the CPU. ``pack`` and ``share`` exist for ``collate``'s signature and have no effect here."""
    grid = collate(rows, device)
    width = grid.input_ids.shape[1]
    wide = torch.nn.functional.pad(grid.input_ids, (0, longest - width))
    return Sequences(
        grid.rows,
        wide,
        None,
        grid.predict // width * longest + grid.predict % width,
        grid.targets,
        grid.cells,
        grid.mask,
    )


def prepare(variant: str, pairs: list[Pair], longest: int, base: Policy, batch_pairs: int) -> list[Work]:
    """Return the timed steps, one per piece."""
    settings = Settings("dpo", batch_pairs, batch_pairs // 2, packing=None if variant == "packed" else False)
    plan, trainer = segment(settings, pairs), make_trainer(settings, fresh(base))
    score_all(trainer, plan)
    step = Stepper(trainer, plan)
    if variant != "to max":
        return [step] * plan.steps

    def padded_step() -> object:
        with patch.object(data.batches, "collate", partial(collate_to, longest)):
            return step()

    return [padded_step] * plan.steps


def compare(
    pairs: list[Pair], longest: int, base: Policy, rounds: int, batch_pairs: int = 4
) -> dict[str, list[Sample]]:
    return alternate(
        {name: partial(prepare, name, pairs, longest, base, batch_pairs) for name in VARIANTS}, rounds
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", default="hh", help="hh, gsm8k, drawn, or PATH:FORMAT")
    parser.add_argument(
        "--longest", type=int, default=512, help="what rows are padded to, and cut at (tokens)"
    )
    parser.add_argument("--pairs", type=int, default=16)
    parser.add_argument("--batch-pairs", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    config = shape("small")
    base = random_policy(config, torch.device("cpu"))
    pairs = benchmark_pairs(args.data, args.pairs, config.vocab_size, args.longest)
    mean = float(np.mean([len(row) for pair in pairs for row in pair]))
    samples = compare(pairs, args.longest, base, args.rounds, args.batch_pairs)
    print(
        f"{machine()}\nmean length {mean:.0f}, {mean / args.longest:.2f} of {args.longest}; {args.rounds} "
        "rounds\n"
    )
    print(
        table(
            ["", "pairs / CPU s, best", "CPU: to max / this", "wall: to max / this"],
            [
                [
                    n,
                    f"{args.pairs / min(s.cpu for s in of):.2f}",
                    str(ratio(samples["to max"], of)),
                    str(ratio(samples["to max"], of, "wall")),
                ]
                for n, of in samples.items()
            ],
        )
    )


if __name__ == "__main__":
    main()
