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
from benchmarks.steps import (
    Pair,
    Settings,
    Stepper,
    drawn_pairs,
    forward,
    fresh,
    make_trainer,
    random_policy,
    rows_of,
    score_all,
    segment_of,
    shape,
)
from common.options import options_of
from data.batches import Segment
from data.views import mismatched
from models.logprobs import keeps_logits
from models.policy import Policy

BASELINE = Path(__file__).with_name("baseline.json")
WORST = 1.15
STEPS, BATCH_PAIRS, ROUNDS = 2, 4, 3


def settings_of(variant: str, loss: str, padded: bool = False) -> Settings:
    """Return the settings of a variant: ``cached``, offline with known reference scores; ``scored``, offline
    with its own scoring before the first step; ``k=1``, humanline, which scores as many rows."""
    sequences = BATCH_PAIRS if loss == "dpo" else 2 * BATCH_PAIRS
    return Settings(
        loss,
        sequences,
        -(-sequences // 2),
        humanline=variant == "k=1",
        packing=False if padded else None,
    )


def prepare(variant: str, settings: Settings, pairs: list[Pair], steps: int, base: Policy) -> list[Work]:
    """Return the timed part of one variant, with a piece for each step. The first piece includes the scoring
    before it (``cached`` has its scores already)."""
    plan = segment_of(settings, pairs, steps)
    trainer = make_trainer(settings, fresh(base))
    step = Stepper(trainer, plan)
    if variant == "cached":
        score_all(trainer, plan)
        return [step] * plan.steps

    def first() -> object:
        score_all(trainer, plan)  # humanline: up to the first sync
        return step()

    return [first, *[step] * (plan.steps - 1)]


def operations(loss: str, plan: Segment, base: Policy) -> float:
    """Return the operations that the steps of ``plan`` cannot do without where reference scores are known:
    the policy's forward and backward, and for KTO its forward over the mismatched rows."""
    config, batch = base.model.config, [row for example in plan.batch(0) for row in example.rows]
    rows = forward(config, rows_of(plan))
    tokens = sum(len(row.completion_ids) for row in batch) // 2  # settings_of halves a batch
    trained = rows.training_on_kept if keeps_logits(tokens, config.vocab_size) else rows.training
    if loss != "kto":
        return trained
    examples = [e for i in range(plan.steps) for e in mismatched(plan.batch(i), 10**6)]
    return trained + forward(config, [e.mismatched for e in examples if e.mismatched is not None]).scoring


def humanline_cost(loss: str, base: Policy) -> dict[str, float]:
    """Return the cost of humanline at k = 1 relative to the same forwards offline, and of offline steps
    relative to bare matrix products with the same number of operations."""
    pairs = drawn_pairs(STEPS * BATCH_PAIRS, base.model.config.vocab_size)
    plan = segment_of(settings_of("cached", loss), pairs, STEPS)
    products = products_alone(operations(loss, plan, base) / STEPS)

    def variant(name: str) -> Variant:
        return lambda: prepare(name, settings_of(name, loss), pairs, STEPS, base)

    variants = {name: variant(name) for name in ("cached", "scored", "k=1")}
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

    def variant(padded: bool) -> Variant:
        return lambda: prepare("cached", settings_of("cached", "dpo", padded), pairs, STEPS, base)

    seconds = least({"padded": variant(True), "packed": variant(False)})
    return {"padded / packed": seconds["padded"] / seconds["packed"]}


def head_cost() -> dict[str, float]:
    """Return the cost per operation at a vocabulary eight times as large relative to the small one; it must
    not grow."""
    settings = settings_of("cached", "dpo")

    def variant(vocabulary: int) -> tuple[Variant, float]:
        base = random_policy(shape("small", vocabulary), torch.device("cpu"))
        pairs = drawn_pairs(BATCH_PAIRS, vocabulary)
        work = operations("dpo", segment_of(settings, pairs, 1), base)
        return lambda: prepare("cached", settings, pairs, 1, base), work

    (large, more), (small, fewer) = variant(65536), variant(8192)
    seconds = least({"large": large, "small": small})
    cost = seconds["large"] / seconds["small"] / (more / fewer)
    return {"an operation at a vocabulary of 65,536 / of 8,192": cost}


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
