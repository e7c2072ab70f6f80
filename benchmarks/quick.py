"""A one-minute check of this machine's cost ratios against the committed ratios of baseline.json.

The exit code is 1 if a ratio has become worse by more than 15 %. Run ``make bench-quick``, or:

    python -m benchmarks.quick            # --write to make the ratios found the new baseline

Every ratio is a cost (more is worse) of CPU time within one run, so that the machine's speed cancels out.
Numerator and denominator are each the minimum of a few rounds, because other work on the machine can only add
time. A ratio that fails is measured once more before it counts.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence as Seq
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch

import data.batches
from benchmarks.measure import Variant, Work, alternate, machine, table
from benchmarks.offline_vs_humanline import floor_of, settings_of, variants_of
from benchmarks.parts import (
    Pair,
    Settings,
    Stepper,
    drawn_pairs,
    fresh,
    make_trainer,
    random_policy,
    score_all,
    segment,
    shape,
)
from common.options import options_of
from data.batches import collate
from data.types import Sequence, Sequences
from models.policy import Policy

BASELINE = Path(__file__).with_name("baseline.json")
WORST = 1.15
STEPS, BATCH_PAIRS, ROUNDS = 2, 4, 3
PADDINGS = ("to max", "padded", "packed")


def humanline_cost(loss: str, base: Policy) -> dict[str, float]:
    """Return the cost of humanline at k = 1 relative to the same forwards offline, and of offline steps
    relative to bare matrix products with the same number of operations."""
    pairs = drawn_pairs(STEPS * BATCH_PAIRS, base.model.config.vocab_size)
    plan = segment(settings_of("cached", loss, BATCH_PAIRS), pairs, STEPS)
    products = products_alone(floor_of(loss, plan, base).cached / STEPS)
    variants = variants_of(loss, pairs, STEPS, BATCH_PAIRS, base, names=("cached", "scored", "k=1"))
    seconds = least(variants | {"products": lambda: [products] * STEPS})
    return {
        f"{loss}: humanline / offline with its own scoring": seconds["k=1"] / seconds["scored"],
        f"{loss}: a step / its products alone": seconds["cached"] / seconds["products"],
    }


def least(variants: dict[str, Variant]) -> dict[str, float]:
    """Return the CPU seconds of the cheapest of a few rounds of each variant. There is no warm-up round,
    because a slow first round is never the cheapest."""
    return {
        name: min(s.cpu for s in samples)
        for name, samples in alternate(variants, ROUNDS, warm_up=False).items()
    }


def products_alone(operations: float, size: int = 512) -> Work:
    """Return the work of square products with ``operations`` operations in total."""
    a, b = torch.randn(2, size, size)
    repeats = round(operations / (2.0 * size**3))
    return lambda: [a @ b for _ in range(repeats)]


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


def prepare_padded(
    variant: str, pairs: list[Pair], longest: int, base: Policy, batch_pairs: int
) -> list[Work]:
    """Return the timed steps, one per piece. ``to max``: rows are padded to the maximum, as HALOs does;
    ``padded`` (model.packing=false): to the longest row of a microbatch; ``packed``: the default."""
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


def padding_cost(base: Policy) -> dict[str, float]:
    pairs = drawn_pairs(8, base.model.config.vocab_size)
    seconds = least({name: partial(prepare_padded, name, pairs, 512, base, 4) for name in PADDINGS})
    return {
        f"{name} / padding to the maximum": seconds[name] / seconds["to max"] for name in ("padded", "packed")
    }


def head_cost() -> dict[str, float]:
    """Return the cost per operation at a vocabulary eight times as large relative to the small one; it must
    not grow."""
    variants: dict[str, Variant] = {}
    work = []
    for vocabulary in (65536, 8192):
        base = random_policy(shape("small", vocabulary), torch.device("cpu"))
        pairs = drawn_pairs(BATCH_PAIRS, vocabulary)
        variants |= {
            str(vocabulary): variants_of("dpo", pairs, 1, BATCH_PAIRS, base, names=("cached",))["cached"]
        }
        work.append(
            floor_of("dpo", segment(settings_of("cached", "dpo", BATCH_PAIRS), pairs, 1), base).cached
        )
    large, small = least(variants).values()
    return {"an operation at a vocabulary of 65,536 / of 8,192": large / small / (work[0] / work[1])}


def measure() -> dict[str, float]:
    base = random_policy(shape("small"), torch.device("cpu"))
    return humanline_cost("dpo", base) | humanline_cost("kto", base) | padding_cost(base) | head_cost()


def worse(costs: dict[str, float], before: dict[str, float]) -> list[str]:
    """Return the names whose cost is more than WORST times the earlier cost."""
    return [name for name, cost in before.items() if costs[name] > WORST * cost]


def main() -> None:
    parser = options_of("python -m benchmarks.quick", __doc__)
    parser.add_argument("--write", action="store_true", help="write the ratios found to baseline.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(machine())
    costs = measure()
    if args.write:
        BASELINE.write_text(
            json.dumps({name: round(cost, 3) for name, cost in costs.items()}, indent=2) + "\n"
        )
    before = json.loads(BASELINE.read_text())
    if worse(costs, before):
        print("measured again: " + ", ".join(worse(costs, before)))
        again = measure()
        costs = {name: min(cost, again[name]) for name, cost in costs.items()}
    bad = worse(costs, before)
    print(
        table(
            ["cost", "now", "baseline", ""],
            [
                [name, f"{costs[name]:.3f}", f"{cost:.3f}", "WORSE" if name in bad else ""]
                for name, cost in before.items()
            ],
        )
    )
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
