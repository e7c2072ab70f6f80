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
from pathlib import Path

import torch

from benchmarks.measure import Variant, Work, alternate, machine, table
from benchmarks.offline_vs_humanline import floor_of, settings_of, variants_of
from benchmarks.parts import drawn_pairs, random_policy, segment, shape
from common.options import options_of
from models.policy import Policy

BASELINE = Path(__file__).with_name("baseline.json")
WORST = 1.15
STEPS, BATCH_PAIRS, ROUNDS = 2, 4, 3


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


def padding_cost(base: Policy) -> dict[str, float]:
    """Return the cost of rows that are padded to the longest of a microbatch relative to packed ones."""
    pairs = drawn_pairs(STEPS * BATCH_PAIRS, base.model.config.vocab_size)
    variants = {
        name: variants_of("dpo", pairs, STEPS, BATCH_PAIRS, base, padded, names=("cached",))["cached"]
        for name, padded in (("padded", True), ("packed", False))
    }
    seconds = least(variants)
    return {"padded / packed": seconds["padded"] / seconds["packed"]}


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
