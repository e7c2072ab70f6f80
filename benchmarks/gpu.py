"""Tokens/s, share of the peak, memory and host syncs of a step on one GPU, in the shapes of published models
with random weights.

    python3 -m benchmarks.gpu                                 # Qwen2.5-1.5B's shape, DPO, 2,048 tokens
    python3 -m benchmarks.gpu --shape llama-3-8b --checkpointing --variants cached k=1 --micro-pairs 1
    python3 -m benchmarks.gpu --losses dpo kto grpo --drawn   # lengths of a quarter of the maximum on average
    python3 -m benchmarks.gpu --device cpu --tiny             # the same code in seconds, without a GPU

The benchmark needs torch, transformers, accelerate and peft alone: no network, no file of weights or
settings. Variants: ``cached``, offline with known reference scores; ``live``, offline with a second model in
memory that scores each batch as it comes, as other trainers do; ``k=1`` and so on, humanline. The last column
says whether a step made the host wait for the device (torch.cuda.set_sync_debug_mode); --profile prints how
the time was spent.
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from dataclasses import replace
from functools import partial
from itertools import pairwise

import benchmarks.standins  # noqa: F401  # isort: skip  # before anything that imports the configuration
import torch

from benchmarks.floor import floor
from benchmarks.measure import Spread, Work, machine, table
from benchmarks.parts import (
    LOSSES,
    SHAPE_NAMES,
    Pair,
    Settings,
    Stepper,
    drawn_pairs,
    fixed_pairs,
    make_trainer,
    random_policy,
    score_all,
    segment,
    shape,
)
from data.batches import Segment
from data.types import Sequence
from data.views import mismatched
from models.distributed import shard, start
from models.policy import Policy, checkpoint_activations, decoder_blocks
from trainers.basic import BasicTrainer

PEAK = 989e12
"""Dense bfloat16 operations a second of an H100 or H200 by the vendor's datasheet; MFU is relative to it."""
WARM_UP = 2


def make_step(variant: str, name: str, settings: Settings, plan: Segment) -> tuple[BasicTrainer, Work]:
    """Return (the trainer, the function that trains its next batch); for ``live``, that includes the second
    model's forward."""
    world = start()

    def policy() -> Policy:
        made = random_policy(shape(name), world.device)
        if settings.checkpointing:
            checkpoint_activations(decoder_blocks(made))
        return made

    k = cycle(variant)
    trainer = make_trainer(
        replace(settings, humanline=variant.startswith("k="), sync_freq=k), policy(), world
    )
    step = Stepper(trainer, plan)
    if variant != "live":
        score_all(trainer, plan)  # humanline: up to the first sync
        return trainer, step
    other = policy().requires_grad_(False)
    other.use_packed_attention()
    shard(other, decoder_blocks(other), world, getattr(torch, settings.dtype))

    def live_step() -> object:
        at = trainer.progress
        trainer.reference.refresh(other, at.step, [(at.step, trainer.microbatches(plan.batch(at.position)))])
        return step()

    return trainer, live_step


def cycle(variant: str) -> int:
    """Return the number of steps after which this variant's work repeats: k, of which one step scores for
    all."""
    return int(variant[2:]) if variant.startswith("k=") else 1


def timed_steps(variant: str, steps: int) -> int:
    """Return ``steps`` rounded up to whole cycles."""
    return -(-steps // cycle(variant)) * cycle(variant)


def planned_steps(variant: str, steps: int) -> int:
    """Return the steps that a plan must have so that each sync among the timed steps scores a whole cycle and
    one step remains to look for host syncs."""
    return WARM_UP + timed_steps(variant, steps) + cycle(variant) + 1


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds(step: Work, steps: int) -> tuple[float, Spread]:
    """Return (mean, spread) of ``steps`` steps, seconds. The host runs ahead of the device, as in training.
    The mean is wall time from an idle device to an idle device; the spread is measured by the device's own
    clock between the ends of steps (by the host's clock without a device)."""
    marks: list[torch.cuda.Event] = []
    ends: list[float] = []
    synchronize()
    began = time.perf_counter()
    for i in range(steps + 1):
        if i:
            step()
        ends.append(time.perf_counter())
        if torch.cuda.is_available():
            marks.append(torch.cuda.Event(enable_timing=True))
            marks[-1].record()
    synchronize()
    mean = (time.perf_counter() - began) / steps
    if marks:
        return mean, Spread.of(a.elapsed_time(b) / 1e3 for a, b in pairwise(marks))
    return mean, Spread.of(b - a for a, b in pairwise(ends))


def syncs(step: Work) -> str:
    """Return ``none``, or the call that made the host wait for the device within a step; the trainer cannot
    be used afterwards."""
    if not torch.cuda.is_available():
        return "no device"
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    except RuntimeError as error:
        if "synchron" not in str(error):
            raise
        frame = error.__traceback__
        while frame is not None and frame.tb_next is not None:
            frame = frame.tb_next
        where = (
            ""
            if frame is None
            else f" at {frame.tb_frame.f_code.co_filename.rsplit('/', 2)[-1]}:{frame.tb_lineno}"
        )
        return str(error).splitlines()[0] + where
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return "none"


def operations_of(variant: str, name: str, settings: Settings, plan: Segment) -> tuple[float, int]:
    """Return (operations of the plan's mean step, its real tokens), without padding and without recomputation
    except the head's (benchmarks.floor)."""
    rows: list[Sequence] = []
    other: list[Sequence] = []
    for i in range(plan.steps):
        batch = mismatched(plan.batch(i), settings.max_length) if settings.loss == "kto" else plan.batch(i)
        rows += [row for e in batch for row in e.rows]
        other += [e.mismatched for e in batch if e.mismatched is not None]
    work = floor(shape(name), rows, other)
    return (work.cached if variant == "cached" else work.scored) / plan.steps, sum(
        map(len, rows)
    ) // plan.steps


def measure(
    variant: str, name: str, settings: Settings, pairs: list[Pair], steps: int, peak: float
) -> list[str]:
    """Return a row of the table."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    plan = segment(settings, pairs, planned_steps(variant, steps))
    try:
        trainer, step = make_step(variant, name, settings, plan)
        seconds(step, WARM_UP)
        mean, spread = seconds(step, timed_steps(variant, steps))
    except torch.OutOfMemoryError as error:
        return [settings.loss, variant, "out of memory", "", "", str(error).split(". ")[0], ""]
    memory = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
    operations, tokens = operations_of(variant, name, settings, plan)
    stopped = syncs(partial(trainer.step, plan)) if variant != "live" else ""
    return [
        settings.loss,
        variant,
        f"{mean:.3f} ({spread.low:.3f} to {spread.high:.3f})",
        f"{tokens / mean:,.0f}",
        f"{operations / mean / peak:.1%}",
        f"{memory:.1f}",
        stopped,
    ]


def profile(variant: str, name: str, settings: Settings, pairs: list[Pair]) -> str:
    """Return a profile of a warm step's time on the device (on the CPU without a device)."""
    _, step = make_step(variant, name, settings, segment(settings, pairs))
    seconds(step, WARM_UP)
    with torch.profiler.profile() as found:
        step()
        synchronize()
    key = "self_device_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    return found.key_averages().table(sort_by=key, row_limit=25, max_name_column_width=60)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="qwen2.5-1.5b", choices=SHAPE_NAMES)
    parser.add_argument("--losses", nargs="+", default=["dpo"], choices=list(LOSSES))
    parser.add_argument("--variants", nargs="+", default=["cached", "live", "k=1", "k=4"])
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument(
        "--length",
        type=int,
        default=2048,
        help="tokens of a row, half of them the completion; with --drawn the maximum",
    )
    parser.add_argument(
        "--drawn",
        action="store_true",
        help="log-normal lengths instead, about a quarter of the maximum on average",
    )
    parser.add_argument("--batch-pairs", type=int, default=16)
    parser.add_argument("--micro-pairs", type=int, default=4)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--padded", action="store_true", help="model.packing=false")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument(
        "--peak", type=float, default=PEAK, help="operations a second that MFU is counted against"
    )
    parser.add_argument("--profile", action="store_true", help="also print where a step's time goes")
    parser.add_argument(
        "--device",
        choices=["cuda", "cpu"],
        help="cpu: also where there is a GPU; by default a GPU if there is one",
    )
    parser.add_argument(
        "--tiny",
        action="store_true",
        help="every loss on a model and rows of no size: whether this program works",
    )
    args = parser.parse_args()
    if args.tiny:
        args.shape, args.losses, args.length, args.batch_pairs, args.micro_pairs, args.steps = (
            "tiny",
            list(LOSSES),
            32,
            2,
            1,
            1,
        )
    if args.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    elif args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: there is no GPU that torch sees")
    return args


def make_pairs(args: argparse.Namespace) -> list[Pair]:
    count, vocabulary = (
        args.batch_pairs * max(planned_steps(v, args.steps) for v in args.variants),
        shape(args.shape).vocab_size,
    )
    if args.drawn:
        return drawn_pairs(
            count, vocabulary, prompt=0.12 * args.length, completion=0.08 * args.length, longest=args.length
        )
    return fixed_pairs(count, vocabulary, args.length, args.length // 2)


def main() -> None:
    gc.freeze()  # what was imported stays, and need not be gone through before every measurement
    args = arguments()
    pairs = make_pairs(args)
    mean = sum(len(row) for pair in pairs for row in pair) / (2 * len(pairs))
    print(
        f"{machine()}; {args.shape}, {args.dtype}, rows of {mean:.0f} tokens of {args.length}, "
        f"{args.batch_pairs} pairs a step, "
        f"{args.micro_pairs} at once, padded {args.padded}, checkpointing {args.checkpointing}"
    )
    rows = []
    for loss in args.losses:
        per_pair = 1 if loss == "dpo" else 2
        settings = Settings(
            loss,
            args.batch_pairs * per_pair,
            args.micro_pairs * per_pair,
            packing=False if args.padded else None,
            dtype=args.dtype,
            max_length=args.length,
            checkpointing=args.checkpointing,
        )
        for variant in args.variants:
            rows.append(measure(variant, args.shape, settings, pairs, args.steps, args.peak))
            print(rows[-1], flush=True)
    print(
        table(
            ["loss", "variant", "s a step, mean (least to most)", "tokens/s", "MFU", "GiB", "host syncs"],
            rows,
        )
    )
    if args.profile:
        print(profile(args.variants[0], args.shape, settings, pairs))


if __name__ == "__main__":
    main()
