"""A one-minute check of this machine's cost ratios against the committed ratios of baseline.json.

The exit code is 1 if a ratio has become worse by more than 15 %. Run ``make bench-quick``, or:

    python -m benchmarks.quick            # --write to make the ratios found the new baseline

Every ratio is a cost (more is worse) of CPU time within one run, so that the machine's speed cancels out.
Numerator and denominator are each the minimum of a few rounds, because other work on the machine can only add
time. A ratio that fails is measured once more before it counts.
"""

from __future__ import annotations

import copy
import json
import sys
from functools import partial
from pathlib import Path

import torch

from benchmarks.measure import Variant, Work, alternate, machine
from benchmarks.steps import (
    Pair,
    Settings,
    Stepper,
    drawn_pairs,
    make_trainer,
    operations,
    random_policy,
    score_all,
    segment_of,
    shape,
)
from common.markdown import table
from common.options import options_of
from models.policy import Policy

BASELINE = Path(__file__).with_name("baseline.json")
WORST = 1.15
STEPS, BATCH_PAIRS, ROUNDS, PRODUCT = 2, 4, 3, 512
"""PRODUCT: the width of the square products that are timed beside steps."""


def settings_of(variant: str, loss: str) -> Settings:
    """Return the settings of a variant: ``cached``, offline with known reference scores; ``scored``, offline
    with its own scoring before the first step; ``k=1``, humanline, which scores as many rows."""
    sequences = BATCH_PAIRS if loss == "dpo" else 2 * BATCH_PAIRS
    return Settings(loss, sequences, -(-sequences // 2), humanline=variant == "k=1")


def prepare(variant: str, settings: Settings, pairs: list[Pair], steps: int, base: Policy) -> list[Work]:
    """Return the timed part of one variant, with a piece for each step. The first piece includes the scoring
    before it (``cached`` has its scores already)."""
    plan = segment_of(settings, pairs, steps)
    trainer = make_trainer(settings, copy.deepcopy(base))
    step = Stepper(trainer, plan)
    if variant == "cached":
        score_all(trainer, plan)
        return [step] * plan.steps

    def first() -> object:
        score_all(trainer, plan)  # humanline: up to the first sync
        return step()

    return [first, *[step] * (plan.steps - 1)]


def humanline_cost(loss: str, base: Policy) -> dict[str, float]:
    """Return the cost of humanline at k = 1 relative to the same forwards offline, and of offline steps
    relative to bare matrix products with the same number of operations."""
    pairs = drawn_pairs(STEPS * BATCH_PAIRS, base.model.config.vocab_size)
    plan = segment_of(settings_of("cached", loss), pairs, STEPS)
    a, b = torch.randn(2, PRODUCT, PRODUCT)
    repeats = round(operations(base.model.config, plan, loss, 10**6, False) / STEPS / (2.0 * PRODUCT**3))
    variants: dict[str, Variant] = {
        name: partial(prepare, name, settings_of(name, loss), pairs, STEPS, base)
        for name in ("cached", "scored", "k=1")
    }
    seconds = least(variants | {"products": lambda: [lambda: [a @ b for _ in range(repeats)]] * STEPS})
    return {
        f"{loss}: humanline / offline with its own scoring": seconds["k=1"] / seconds["scored"],
        f"{loss}: a step / its products alone": seconds["cached"] / seconds["products"],
    }


def least(variants: dict[str, Variant]) -> dict[str, float]:
    """Return the CPU seconds of the cheapest of a few rounds of each variant. There is no warm-up round,
    because a slow first round is never the cheapest."""
    found = alternate(variants, ROUNDS)
    return {name: min(s.cpu for s in samples) for name, samples in found.items()}


def measure() -> dict[str, float]:
    base = random_policy(shape("small"), torch.device("cpu"))
    return humanline_cost("dpo", base) | humanline_cost("kto", base)


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
        kept = {name: round(cost, 3) for name, cost in costs.items()}
        BASELINE.write_text(json.dumps(kept, indent=2) + "\n")
    before = json.loads(BASELINE.read_text())
    if worse(costs, before):
        print("measured again: " + ", ".join(worse(costs, before)))
        again = measure()
        costs = {name: min(cost, again[name]) for name, cost in costs.items()}
    bad = worse(costs, before)
    rows = [
        [name, f"{costs[name]:.3f}", f"{cost:.3f}", "WORSE" if name in bad else ""]
        for name, cost in before.items()
    ]
    print(table(["cost", "now", "baseline", ""], rows))
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
