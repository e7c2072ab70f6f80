"""The cost of humanline relative to offline training, for DPO, KTO and GRPO.

    python -m benchmarks.offline_vs_humanline                            # the preference data, or lengths drawn like theirs
    python -m benchmarks.offline_vs_humanline --data my.jsonl:preference # another file and its format (data.format)

Variants: ``cached``, offline with known reference scores; ``scored``, offline with its own scoring before the
first step; ``k=1``, ``k=4``, ``k=16``, humanline. Humanline scores each batch once, whatever k, so it is
compared with ``scored`` (the same forwards), and its ratio to ``cached`` is compared with the floor
(benchmarks.floor).
"""  # noqa: E501

from __future__ import annotations

import argparse

import torch

from benchmarks.floor import Floor, floor
from benchmarks.measure import (
    Sample,
    Variant,
    Work,
    alternate,
    in_a_row,
    in_fresh_process,
    machine,
    memory_of,
    ratio,
    table,
)
from benchmarks.parts import (
    LOSSES,
    Pair,
    Settings,
    Stepper,
    benchmark_pairs,
    fresh,
    make_trainer,
    random_policy,
    rows_of,
    score_all,
    segment,
    shape,
)
from common.options import options_of
from data.batches import Segment
from data.types import Sequence
from data.views import mismatched
from models.logprobs import keeps_logits
from models.policy import Policy

VARIANTS = ("cached", "scored", "k=1", "k=4", "k=16")


def prepare(variant: str, settings: Settings, pairs: list[Pair], steps: int, base: Policy) -> list[Work]:
    """Return the timed part of one variant, with a piece for each step. The first piece includes the scoring
    before it (``cached`` has its scores already)."""
    plan = segment(settings, pairs, steps)
    trainer = make_trainer(settings, fresh(base))
    step = Stepper(trainer, plan)
    if variant == "cached":
        score_all(trainer, plan)
        return [step] * plan.steps

    def first() -> object:
        score_all(trainer, plan)  # humanline: up to the first sync
        return step()

    return [first, *[step] * (plan.steps - 1)]


def settings_of(variant: str, loss: str, batch_pairs: int, padded: bool = False) -> Settings:
    sequences = batch_pairs if loss == "dpo" else 2 * batch_pairs
    k = int(variant[2:]) if variant.startswith("k=") else None
    return Settings(
        loss,
        sequences,
        -(-sequences // 2),
        humanline=k is not None,
        sync_freq=k or 1,
        packing=False if padded else None,
    )


def floor_of(loss: str, plan: Segment, base: Policy) -> Floor:
    other: list[Sequence] = []
    if loss == "kto":
        batches = (mismatched(plan.batch(i), 10**6) for i in range(plan.steps))
        other = [
            example.mismatched for batch in batches for example in batch if example.mismatched is not None
        ]
    config, batch = base.model.config, [row for example in plan.batch(0) for row in example.rows]
    tokens = sum(len(row.completion_ids) for row in batch) // 2  # settings_of halves a batch
    return floor(config, rows_of(plan), other, keeps_logits(tokens, config.vocab_size))


def variants_of(
    loss: str,
    pairs: list[Pair],
    steps: int,
    batch_pairs: int,
    base: Policy,
    padded: bool = False,
    names: tuple[str, ...] = VARIANTS,
) -> dict[str, Variant]:
    """Return the variants ``names`` of this loss, to be timed in turn."""

    def variant(name: str) -> Variant:
        return lambda: prepare(name, settings_of(name, loss, batch_pairs, padded), pairs, steps, base)

    return {name: variant(name) for name in names}


def report(
    loss: str, samples: dict[str, list[Sample]], against: Floor, memory: dict[str, dict[str, float]]
) -> str:
    rows = []
    for name, variant_samples in samples.items():
        to_scored, to_cached, wall = (
            ratio(variant_samples, samples["scored"]),
            ratio(variant_samples, samples["cached"]),
            ratio(variant_samples, samples["scored"], "wall"),
        )
        used = memory.get(name)
        rows.append(
            [
                name,
                f"{min(s.cpu for s in variant_samples):.2f}",
                str(to_scored),
                str(wall),
                str(to_cached),
                f"{to_cached.median / against.ratio:.3f}" if name != "cached" else "",
                f"{used['step']:.0f}" if used else "",
            ]
        )
    head = [
        f"{loss} (floor {against.ratio:.3f})",
        "CPU s, least",
        "CPU / scored",
        "wall / scored",
        "CPU / cached",
        "of the floor",
        "MiB",
    ]
    return table(head, rows)


def memory_apart(variant: str, loss: str, pairs: list[Pair], args: argparse.Namespace) -> dict[str, float]:
    """Return the memory of up to four steps of one variant, MiB. For a fresh process."""
    torch.set_num_threads(1)
    base, steps = random_policy(shape(args.model), torch.device("cpu")), min(args.steps, 4)
    settings = settings_of(variant, loss, args.batch_pairs, args.padded)
    return memory_of(in_a_row(prepare(variant, settings, pairs[: steps * args.batch_pairs], steps, base)))


def main() -> None:
    parser = options_of("python -m benchmarks.offline_vs_humanline", __doc__)
    parser.add_argument("--data", default="hh", help="hh, gsm8k, drawn, or PATH:FORMAT")
    parser.add_argument("--losses", nargs="+", default=list(LOSSES), choices=list(LOSSES))
    parser.add_argument("--model", default="small")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--batch-pairs", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--padded", action="store_true", help="model.packing=false")
    parser.add_argument(
        "--no-memory", action="store_true", help="leave out the memory, which takes a process a variant"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    config = shape(args.model)
    base = random_policy(config, torch.device("cpu"))
    pairs = benchmark_pairs(args.data, args.batch_pairs * args.steps, config.vocab_size)
    print(
        f"{machine()}\n{args.steps} steps of {args.batch_pairs} pairs, {args.rounds} rounds, padded "
        f"{args.padded}\n"
    )
    for loss in args.losses:
        measured = () if args.no_memory else VARIANTS
        memory = {name: in_fresh_process(memory_apart, name, loss, pairs, args) for name in measured}
        plan = segment(settings_of("cached", loss, args.batch_pairs), pairs, args.steps)
        samples = alternate(
            variants_of(loss, pairs, args.steps, args.batch_pairs, base, args.padded), args.rounds
        )
        print(report(loss, samples, floor_of(loss, plan, base), memory) + "\n", flush=True)


if __name__ == "__main__":
    main()
