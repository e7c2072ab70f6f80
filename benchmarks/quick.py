"""A minute's guard: ratios of this machine against the committed ratios of baseline.json; exit code 1 where one has become worse by
more than 15 %. ``make bench-quick``, or:

    python -m benchmarks.quick            # --write to make the ratios found the new baseline

Every ratio is a cost (more is worse) of CPU time within one run, so that the machine cancels out. One that fails is measured once
more before it counts.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

from benchmarks import offline_vs_humanline, padding
from benchmarks.floor import floor
from benchmarks.measure import Sample, machine, ratio, table, timed
from benchmarks.parts import Settings, drawn_pairs, random_policy, rows_of, segment, shape
from models.policy import Policy

BASELINE = Path(__file__).with_name("baseline.json")
WORST = 1.15
STEPS, BATCH_PAIRS, ROUNDS = 2, 4, 2


def humanline_cost(loss: str, base: Policy) -> dict[str, float]:
    """Humanline at k = 1 against the same forwards offline, and offline's steps against bare matrix products of as many operations."""
    pairs = drawn_pairs(STEPS * BATCH_PAIRS, base.model.config.vocab_size)
    samples = offline_vs_humanline.compare(loss, pairs, STEPS, BATCH_PAIRS, ROUNDS, base, variants=("cached", "scored", "k=1"))
    plan = segment(offline_vs_humanline.settings_of("cached", loss, BATCH_PAIRS), pairs, STEPS)
    work = offline_vs_humanline.floor_of(loss, plan, base).cached
    least = min(s.cpu for s in samples["cached"])
    return {f"{loss}: humanline / offline with its own scoring": ratio(samples["k=1"], samples["scored"]).median,
            f"{loss}: a step / its products alone": least / products_alone(work).cpu}


def products_alone(operations: float, size: int = 512) -> Sample:
    """How long a square product takes on this machine, scaled to ``operations``."""
    a, b = torch.randn(2, size, size)
    repeats = 40
    timed(lambda: [a @ b for _ in range(repeats)])
    best = min((timed(lambda: [a @ b for _ in range(repeats)]) for _ in range(5)), key=lambda s: s.cpu)
    scale = operations / (2.0 * size**3 * repeats)
    return Sample(best.wall * scale, best.cpu * scale)


def padding_cost(base: Policy) -> dict[str, float]:
    samples = padding.compare(drawn_pairs(8, base.model.config.vocab_size), 512, base, ROUNDS, batch_pairs=4)
    return {f"{name} / padding to the maximum": ratio(samples[name], samples["to max"]).median for name in ("padded", "packed")}


def head_cost() -> dict[str, float]:
    """A vocabulary eight times as large: cost per operation must not grow."""
    costs = []
    for vocabulary in (8192, 65536):
        base = random_policy(shape("small", vocabulary), torch.device("cpu"))
        pairs = drawn_pairs(4, vocabulary)
        work = floor(base.model.config, rows_of(segment(Settings(), pairs, 1))).cached
        samples = offline_vs_humanline.compare("dpo", pairs, 1, 4, ROUNDS, base, variants=("cached",))
        costs.append(min(s.cpu for s in samples["cached"]) / work)
    return {"an operation at a vocabulary of 65,536 / of 8,192": costs[1] / costs[0]}


def measure() -> dict[str, float]:
    base = random_policy(shape("small"), torch.device("cpu"))
    return humanline_cost("dpo", base) | humanline_cost("kto", base) | padding_cost(base) | head_cost()


def worse(found: dict[str, float], before: dict[str, float]) -> list[str]:
    """The names whose cost is more than WORST times what it was."""
    return [name for name, cost in before.items() if found[name] > WORST * cost]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the ratios found to baseline.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(machine())
    found = measure()
    if args.write:
        BASELINE.write_text(json.dumps({name: round(cost, 3) for name, cost in found.items()}, indent=2) + "\n")
    before = json.loads(BASELINE.read_text())
    if worse(found, before):
        print("measured again: " + ", ".join(worse(found, before)))
        again = measure()
        found = {name: min(cost, again[name]) for name, cost in found.items()}
    bad = worse(found, before)
    print(table(["cost", "now", "baseline", ""],
                [[name, f"{found[name]:.3f}", f"{cost:.3f}", "WORSE" if name in bad else ""] for name, cost in before.items()]))
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
