"""Training steps at the limit of a GPU's memory: the peak against the plan, tokens/s, MFU, and how evenly the
ranks are loaded.

    python -m benchmarks.gpu_step                                       # Qwen2.5-1.5B's shape, one GPU
    torchrun --nproc-per-node 8 -m benchmarks.gpu_step --shape llama-3-8b
    python -m benchmarks.gpu_step --device cpu --tiny                   # the same code without a GPU

Weights and rows are random; a row's length is about a quarter of ``--length`` on average. The tokens of a
microbatch are those that the memory plan gives the card. ``benchmarks.gpu_check`` runs this with the
comparisons of ``benchmarks.gpu_paths``. Under a launcher of several nodes it runs alone.
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.checks import FAILED, NOT_HERE, OK, Check, attempted, written
from benchmarks.gpu import PEAK, WARM_UP, operations_of, planned_steps, seconds, timed_steps
from benchmarks.parts import (
    LOSSES,
    Settings,
    Stepper,
    drawn_pairs,
    make_trainer,
    random_policy,
    score_all,
    segment,
    shape,
)
from common.worker_process import WorkerProcess
from data.balance import row_tokens
from data.batches import Segment
from jobs.memory_neighbours import GIB
from jobs.memory_parts import Card
from jobs.memory_plan import CONTEXT, gpu_here, planned_tokens, remembered
from jobs.memory_simulation import Answer, Question
from jobs.microbatch_fit import Ask, step_size, with_tokens
from models.distributed import World, gather_objects, on_main, start, stop

SECONDS = 600.0
"""Time that the simulation of a step may take."""
OFF = 0.1
"""Largest share by which a step's peak may differ from the plan."""
MESSAGE = 1 << 28
"""Bytes that each rank sends when the connection between ranks is timed."""


@dataclass(frozen=True)
class Planned:
    """What the memory plan says of a step."""

    tokens: int | None
    """Most tokens of a microbatch; None: a rank's share of the batch in one pass."""
    answer: Answer
    """What the step takes, cut in this way."""


def checks(args: argparse.Namespace, world: World) -> Iterator[Check]:
    """Yield the checks of every loss, plain and humanline, and of the connection between ranks."""
    yield attempted("ranks", partial(connection, world))
    worker = WorkerProcess("jobs.memory_plan", log=None, env={"CUDA_VISIBLE_DEVICES": ""})

    def simulated(question: Question) -> Answer:
        answer: Answer = worker.call("answer", question, timeout=SECONDS)
        return answer

    try:
        for loss in args.losses:
            for humanline in (False, True):
                name = f"step, {loss}{' humanline' * humanline}"
                yield attempted(name, partial(measured, name, args, world, loss, humanline, simulated))
    finally:
        worker.close()


def connection(world: World) -> Check:
    """Seconds of a gather among all ranks, as FSDP does for every block."""
    if world.size == 1:
        return Check("ranks", NOT_HERE, "there is one rank")
    own = torch.ones((MESSAGE if world.device.type == "cuda" else 1 << 20) // 4, device=world.device)
    every = torch.empty(world.size * len(own), device=world.device)
    took = []
    for _ in range(4):
        synchronize()
        began = time.perf_counter()
        dist.all_gather_into_tensor(every, own)
        synchronize()
        took.append(time.perf_counter() - began)
    right = bool((every == 1).all())
    received = (world.size - 1) * own.numel() * 4 / min(took[1:]) / 1e9
    text = f"{world.size} ranks gather at {received:.1f} GB/s a rank"
    return Check(
        "ranks", OK if right else FAILED, text, {"ranks": world.size, "gigabytes_a_second": received}
    )


def measured(
    name: str, args: argparse.Namespace, world: World, loss: str, humanline: bool, simulated: Ask
) -> Check:
    """Plan a step, take some, and compare."""
    variant = "k=1" if humanline else "cached"
    units = args.rows * world.size // (2 if loss == "dpo" else 1)
    settings = Settings(loss, units, units, humanline=humanline, dtype="bfloat16", max_length=args.length)
    count = args.rows * world.size // 2 * planned_steps(variant, args.steps)
    vocabulary = shape(args.shape).vocab_size
    pairs = drawn_pairs(count, vocabulary, 0.12 * args.length, 0.08 * args.length, args.length)
    plan = segment(settings, pairs, planned_steps(variant, args.steps))
    found = on_main(lambda: plan_of(settings, plan, args, world, simulated))
    settings = replace(settings, microbatch_tokens=found.tokens)
    gc.collect()
    policy = random_policy(shape(args.shape), world.device)
    trainer = make_trainer(settings, policy, world)
    score_all(trainer, plan)
    step = Stepper(trainer, plan)
    if world.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    seconds(step, WARM_UP)
    mean, spread = seconds(step, timed_steps(variant, args.steps))
    peaks = gather_objects(peak_gib(world))
    operations, tokens = operations_of(variant, args.shape, settings, plan)
    assert step.watch.waiting is not None
    numbers = {
        "planned_gib": step_size(found.answer),
        "peak_gib": max(peaks),
        "microbatch_tokens": found.answer.tokens,
        "seconds": mean,
        "longest_seconds": spread.high,
        "tokens_per_second": tokens / mean,
        "mfu": operations / mean / args.peak / world.size,
        "token_balance": step.watch.waiting.known["token_balance"],
    }
    return judged(name, numbers, world)


def judged(name: str, numbers: dict[str, float], world: World) -> Check:
    """Return the verdict on the numbers of a step: its peak is the plan's, or there is none to compare."""
    said = (
        f"{numbers['tokens_per_second']:,.0f} tokens/s, MFU {numbers['mfu']:.1%}, balance "
        f"{numbers['token_balance']:.2f}, microbatches of {numbers['microbatch_tokens']:,.0f} tokens, "
        f"planned {numbers['planned_gib']:.3g} GiB"
    )
    if world.device.type != "cuda":
        return Check(name, OK, f"{said}; a CPU's peak is not measured here", numbers)
    off = numbers["planned_gib"] / numbers["peak_gib"] - 1
    verdict = OK if abs(off) <= OFF else FAILED
    return Check(name, verdict, f"{said}, taken {numbers['peak_gib']:.3g} (plan {off:+.1%})", numbers)


def plan_of(
    settings: Settings, plan: Segment, args: argparse.Namespace, world: World, simulated: Ask
) -> Planned:
    """Return what the memory plan says of the heaviest batch of ``plan``."""
    batch = max(map(plan.batch, range(plan.steps)), key=lambda batch: sum(map(row_tokens, batch)))
    found, gpu = shape(args.shape), world.device.type == "cuda"
    asked = Question(settings.config(), batch, [], world.size, gpu, found)
    here = gpu_here()
    room = args.room or (Card(*here).room - CONTEXT if here else float("inf"))
    ask = remembered(simulated)
    longest = max(row_tokens(e) for i in range(plan.steps) for e in plan.batch(i))
    tokens = planned_tokens(asked, found, room, ask, longest)
    return Planned(tokens, ask(asked if tokens is None else with_tokens(asked, tokens)))


def peak_gib(world: World) -> float:
    """Return the most that this rank's tensors took since the count began, 0 on a CPU."""
    return torch.cuda.max_memory_allocated() / GIB if world.device.type == "cuda" else 0.0


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="qwen2.5-1.5b")
    parser.add_argument("--losses", nargs="+", default=list(LOSSES), choices=list(LOSSES))
    parser.add_argument("--length", type=int, default=2048, help="most tokens of a row")
    parser.add_argument("--rows", type=int, default=128, help="rows of a step for each rank")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--room", type=float, help="GiB that a step may take, by default the card's")
    parser.add_argument("--peak", type=float, default=PEAK, help="operations a second that MFU counts from")
    parser.add_argument("--device", choices=["cuda", "cpu"], help="by default a GPU if there is one")
    parser.add_argument("--tiny", action="store_true", help="a model and rows of no size")
    parser.add_argument("--out", type=Path, help="also append every check to this file, as JSON lines")
    args = parser.parse_args()
    if args.tiny:
        args.shape, args.length, args.rows, args.steps = "tiny", 64, 8, 1
    if args.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    elif args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: there is no GPU that torch sees")
    return args


def main() -> None:
    args, world = arguments(), start()
    for check in written(checks(args, world), args.out if world.is_main else None):
        if world.is_main:
            print(check, flush=True)
    stop()


if __name__ == "__main__":
    main()
