"""The parts of one step's time, and the speed of its matrix products relative to the fastest product on this
machine.

    python -m benchmarks.profile                           # DPO, cached reference scores, lengths as the preference data's
    python -m benchmarks.profile --loss kto --variant k=1 --padded
    python -m benchmarks.profile --model smollm2-135m --dtype bfloat16 --steps 2

The same batch is trained repeatedly under torch.profiler, on a CPU with one thread; the fastest of these
steps is reported. Parts: ``body products`` (the blocks' matrix products), ``head`` (models/logprobs.py,
products and softmax), ``attention`` (its kernel), ``elementwise`` (norms, rotary embedding, SiLU, residuals,
copies), ``optimizer`` (AdamW and clipping), ``sharding`` (FSDP's hooks and copies), ``python`` (time outside
any operator). Operations are counted from the operands' shapes.
"""  # noqa: E501

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import cast

import torch
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.measure import machine, table, timed
from benchmarks.offline_vs_humanline import settings_of
from benchmarks.parts import (
    LOSSES,
    benchmark_pairs,
    fresh,
    make_trainer,
    random_policy,
    score_all,
    segment,
    shape,
)
from common.options import options_of
from data.batches import Segment
from trainers.basic import BasicTrainer

STEP = "one step"
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm")
ATTENTION = (
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
)
PARTS = ("body products", "head", "attention", "elementwise", "optimizer", "sharding", "python")
Shape = tuple[int, int, int]
"""Rows, inner size and columns of a product; the rows of a batched product are added up."""


@dataclass
class Part:
    """One part of one step."""

    seconds: float = 0.0
    products: Counter[Shape] = field(default_factory=Counter)
    in_kernels: float = 0.0
    """Operations of attention kernels."""

    @property
    def operations(self) -> float:
        return self.in_kernels + sum(2 * m * k * n * times for (m, k, n), times in self.products.items())


def lineage(event: FunctionEvent) -> Iterator[str]:
    """Yield the event's name, its parent's, and so on."""
    at: FunctionEvent | None = event
    while at is not None:
        yield at.name
        at = at.cpu_parent


def part_of(event: FunctionEvent) -> str:
    """Return the element of PARTS to which an event's own time belongs."""
    names = list(lineage(event))
    if any(name.startswith("_LogProbs") for name in names):
        return "head"
    if any(name.startswith(("Optimizer.", "aten::_foreach", "aten::linalg_vector_norm")) for name in names):
        return "optimizer"
    if any("scaled_dot_product" in name for name in names):
        return "attention"
    if any(name in PRODUCTS for name in names):
        return "body products"
    if any(name.startswith("FSDP") for name in names):
        return "sharding"
    return "elementwise" if event.name.startswith("aten::") else "python"


def shapes_of(event: FunctionEvent) -> list[list[int]]:
    """Return the shapes of the event's operands, [] for one that is no tensor (torch's annotation says
    tuple[int, ...])."""
    return cast(list[list[int]], event.input_shapes)


def product_of(event: FunctionEvent) -> Shape | None:
    """Return the shape of the event's product; None if the event is no product."""
    if event.name not in PRODUCTS:
        return None
    operands = shapes_of(event)[
        event.name == "aten::addmm" :
    ]  # what is added comes first, a given result last
    left, right = [s for s in operands if len(s) >= 2][:2]
    return left[-2] * (left[0] if len(left) == 3 else 1), left[-1], right[-1]


def attention_of(event: FunctionEvent) -> float:
    """Return the operations of the event's attention kernel under a causal mask, from the shape of its
    queries: two products forward, four backward (benchmarks.floor). 0 for another event."""
    if event.name not in ATTENTION:
        return 0.0
    rows, heads, length, size = next(s for s in shapes_of(event) if len(s) == 4)
    return 2.0 * rows * heads * length**2 * size * (2 if event.name.endswith("backward") else 1)


def parts(events: list[FunctionEvent]) -> list[dict[str, Part]]:
    """Return the parts of each profiled step: every event's own time; together they are the whole step."""
    steps = {id(e): i for i, e in enumerate(e for e in events if e.name == STEP)}
    step_parts = [{name: Part() for name in PARTS} for _ in steps]
    for event in events:
        root = event
        while root.cpu_parent is not None:
            root = root.cpu_parent
        if id(root) not in steps:
            continue
        part = step_parts[steps[id(root)]][part_of(event)]
        part.seconds += event.self_cpu_time_total / 1e6
        if (product := product_of(event)) is not None:
            part.products[product] += 1
        part.in_kernels += attention_of(event)
    return step_parts


def profiled(trainer: BasicTrainer, plan: Segment, steps: int) -> tuple[list[dict[str, Part]], float]:
    """Return (the parts of ``steps`` profiled steps, CPU seconds of the cheapest of ``steps`` unprofiled
    steps, before which two do not count). All steps train the plan's first batch."""
    score_all(trainer, plan)
    start = trainer.state_dict()
    known = dict(trainer.reference.scores)

    def step() -> None:
        trainer.load_state_dict(start, known)
        trainer.step(plan).pending.read()

    cheapest = min([timed(step).cpu for _ in range(2 + steps)][2:])
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        for _ in range(steps):
            with record_function(STEP):
                step()
    return parts(list(profiler.events())), cheapest


def peak(dtype: torch.dtype = torch.float32, sizes: tuple[int, ...] = (256, 512, 1024, 2048)) -> float:
    """Return the operations a second of the fastest square product, by CPU time."""
    return max(rate((size, size, size), dtype) for size in sizes)


def rate(sizes: Shape, dtype: torch.dtype, work: float = 4e9, tries: int = 5) -> float:
    """Return the operations a second of a product of this shape alone, the best of ``tries`` tries, which
    together do about ``work`` operations."""
    m, k, n = sizes
    left, right = torch.randn(m, k).to(dtype), torch.randn(k, n).to(dtype)
    repeats = max(int(work / tries / (2 * m * k * n)), 1)
    return (
        2
        * m
        * k
        * n
        * repeats
        / min(timed(lambda: [left @ right for _ in range(repeats)]).cpu for _ in range(tries))
    )


def alone(products: Counter[Shape], dtype: torch.dtype) -> float:
    """Return the seconds that these products take one by one, with nothing between them."""
    return sum(
        2 * m * k * n * times / rate((m, k, n), dtype, work=4e8) for (m, k, n), times in products.items()
    )


def report(
    steps: list[dict[str, Part]], cheapest: float, best: float, dtype: torch.dtype = torch.float32
) -> str:
    """Return a table with a row for each part of the fastest step: time, share, operations and speed. Below
    it, lines that explain the distance to ``best`` (the peak, operations a second). ``cheapest``: seconds."""
    step = min(steps, key=lambda parts: sum(part.seconds for part in parts.values()))
    took, work = {name: step[name].seconds for name in PARTS}, {name: step[name].operations for name in PARTS}
    whole, operations = sum(took.values()), sum(work.values())
    rows = []
    for name, seconds, count in [*((n, took[n], work[n]) for n in PARTS), ("the step", whole, operations)]:
        speed = (
            [f"{count / 1e9:.2f}", f"{count / seconds / 1e9:.1f}", f"{count / seconds / best:.0%}"]
            if count
            else [""] * 3
        )
        rows.append([name, f"{seconds * 1e3:.1f}", f"{seconds / whole:.1%}", *speed])
    ideal, single = operations / best, alone(step["body products"].products + step["head"].products, dtype)
    inside = took["body products"] + took["head"]
    rest = whole - inside
    lines = [
        f"the fastest square product: {best / 1e9:.1f} GFLOP/s; the step's operations at that speed: "
        f"{ideal * 1e3:.1f} ms",
        f"body's and head's products one by one, in their own shapes: {single * 1e3:.1f} ms",
        f"the same within the step, the head's softmax included: {inside * 1e3:.1f} ms",
        f"everything else: {rest * 1e3:.1f} ms",
        f"CPU time of a step without the profiler: {cheapest * 1e3:.1f} ms, {ideal / cheapest:.0%} of the "
        "fastest product's speed "
        "(parts are wall time: where they come to much more, something else was running)",
    ]
    head = ["part", "ms a step", "share", "GFLOP", "GFLOP/s", "of the fastest product"]
    return table(head, rows) + "\n\n" + "\n".join(lines)


def batch_tokens(trainer: BasicTrainer, plan: Segment) -> tuple[int, int]:
    """Return (real tokens, computed tokens) of the first batch's rows."""
    micros = trainer.microbatches(plan.batch(0))
    return sum(len(row) for m in micros for row in m.sequences.rows), sum(
        m.sequences.input_ids.numel() for m in micros
    )


def main() -> None:
    parser = options_of("python -m benchmarks.profile", __doc__)
    parser.add_argument("--data", default="hh", help="hh, gsm8k, drawn, or PATH:FORMAT")
    parser.add_argument("--loss", default="dpo", choices=list(LOSSES))
    parser.add_argument("--variant", default="cached", help="cached, or k=1 and so on")
    parser.add_argument("--model", default="small")
    parser.add_argument("--batch-pairs", type=int, default=8)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--padded", action="store_true", help="model.packing=false")
    args = parser.parse_args()
    torch.set_num_threads(1)
    config = shape(args.model)
    pairs = benchmark_pairs(args.data, 2 * args.batch_pairs, config.vocab_size)
    settings = settings_of(args.variant, args.loss, args.batch_pairs, args.padded)
    settings, dtype = replace(settings, dtype=args.dtype), getattr(torch, args.dtype)
    plan = segment(settings, pairs, 2)
    trainer = make_trainer(settings, fresh(random_policy(config, torch.device("cpu"))))
    real, padded = batch_tokens(trainer, plan)
    print(
        f"{machine()}\n{args.loss}, {args.variant}, {args.batch_pairs} pairs, padded {args.padded}, "
        f"{args.dtype}; {real:,} real tokens of {padded:,} computed\n"
    )
    print(report(*profiled(trainer, plan, args.steps), peak(dtype), dtype))


if __name__ == "__main__":
    main()
