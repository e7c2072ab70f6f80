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
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from queue import SimpleQueue
from typing import cast

import torch
import torch.distributed as dist

from benchmarks.checks import FAILED, NOT_HERE, OK, SHAPE_NAMES, Check, attempted, failed, written
from benchmarks.floor import floor
from benchmarks.measure import Spread, Work
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
from common.options import options_of
from common.worker_process import WorkerError, WorkerProcess
from config.schema_model import SELECTIVE
from data.balance import row_tokens
from data.batches import Segment, heaviest, size_of, widest
from data.types import Sequence
from data.views import mismatched
from memory.decisions import gpu_here
from memory.fit import Ask, how_rows_are_joined, planned_tokens, remembered, step_size, with_tokens
from memory.parts import GIB, neighbours
from memory.simulate import MemoryNeed, MemoryRequest
from models.distributed import World, gather_objects, on_main, shard, start, stop
from models.fingerprint import weights_fingerprint
from models.policy import decoder_blocks
from trainers.assembly import trainer_class

PEAK = 989e12
"""Dense bfloat16 operations a second of an H100 or H200 by the vendor's datasheet; MFU is relative to it."""
WARM_UP = 2
CHECKPOINTING: dict[str, bool | str] = {"none": False, "selective": SELECTIVE, "full": True}
SECONDS = 1800.0
"""Time that the simulation of a step may take."""
TOLERANCE = 0.1
"""Largest share by which a step's peak may differ from the plan."""
MESSAGE = 1 << 28
"""Bytes that each rank sends when the connection between ranks is timed."""


@dataclass(frozen=True)
class Planned:
    """What the memory plan says of a step."""

    tokens: int | None
    """Most tokens of a microbatch; None: a rank's share of the batch in one pass."""
    answer: MemoryNeed
    """What the step takes, cut in this way."""
    room: float
    """GiB that it may take."""


class Simulations:
    """The memory plan's worker process, started when it is first asked and anew after it died."""

    def __init__(self) -> None:
        self._worker: WorkerProcess | None = None

    def __call__(self, question: MemoryRequest) -> MemoryNeed:
        """Return what a step of the question takes. Raises WorkerError."""
        if self._worker is None:
            self._worker = WorkerProcess("memory.plan", log=None, env={"CUDA_VISIBLE_DEVICES": ""})
        try:
            answer: MemoryNeed = self._worker.call("answer", question, timeout=SECONDS)
        except WorkerError:
            self.close()
            raise
        return answer

    def close(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()


def checks(args: argparse.Namespace, world: World) -> Iterator[Check]:
    """Yield the checks of the ranks, and of the steps of every loss, plain and humanline."""
    works: dict[str, Callable[[], Check]] = {
        "ranks": partial(connection, world),
        "fingerprint over ranks": partial(fingerprint, world),
    }
    beside = max(1, (os.cpu_count() or 1) // 2)
    idle: SimpleQueue[Simulations] = SimpleQueue()
    with ThreadPoolExecutor(beside) as pool, ExitStack() as stack:
        for _ in range(beside):
            idle.put(stack.enter_context(closing(Simulations())))
        awaited = []
        for loss in args.losses:
            for humanline in (False, True):
                name = f"step, {loss}{' humanline' * humanline}"
                settings, plan = steps_of(args, world, loss, humanline)
                future = pool.submit(planned, settings, plan, args, world, idle) if world.is_main else None
                works[name] = partial(measured, name, args, world, settings, plan, future)
                awaited += [future] if future else []
        wait(awaited)  # what is timed has the host for itself
        for name, work in works.items():
            yield attempted(name, work) if world.size == 1 else together(name, work, args.out)


def together(name: str, work: Callable[[], Check], out: Path | None) -> Check:
    """Return what ``work`` finds on several ranks. An error on any of them ends them all, since the others
    may wait for it in a collective; the rank that has it writes it down."""
    try:
        return work()
    except Exception as error:
        print(*written([failed(name, error)], out), flush=True)
        raise


def connection(world: World) -> Check:
    """Seconds of a gather among all ranks, as FSDP does for every block. Each sends its number."""
    if world.size == 1:
        return Check("ranks", NOT_HERE, "there is one rank")
    count = (MESSAGE if world.device.type == "cuda" else 1 << 20) // 4
    own = torch.full((count,), float(world.rank), device=world.device)
    every = torch.empty(world.size * count, device=world.device)
    took = []
    for _ in range(4):
        synchronize()
        began = time.perf_counter()
        dist.all_gather_into_tensor(every, own)
        synchronize()
        took.append(time.perf_counter() - began)
    sent = torch.arange(world.size, device=world.device)[:, None]
    right = bool((every.view(world.size, count) == sent).all())
    received = (world.size - 1) * count * 4 / min(took[1:]) / 1e9
    text = f"{world.size} ranks gather at {received:.1f} GB/s a rank"
    return Check(
        "ranks", OK if right else FAILED, text, {"ranks": world.size, "gigabytes_a_second": received}
    )


def fingerprint(world: World) -> Check:
    """The digest of weights that are sharded is that of the whole ones."""
    policy = random_policy(shape("tiny"), world.device)
    whole = weights_fingerprint(policy.named_parameters())
    shard(policy, decoder_blocks(policy), world, torch.bfloat16)
    same = weights_fingerprint(policy.named_parameters()) == whole
    text = "that of the whole weights" if same else "not that of the whole weights"
    return Check("fingerprint over ranks", OK if same else FAILED, text)


def steps_of(args: argparse.Namespace, world: World, loss: str, humanline: bool) -> tuple[Settings, Segment]:
    """Return the settings of a run and the batches of its steps."""
    steps = WARM_UP + args.steps + 1  # one more: a sync at the last timed step scores the batch after it
    units = args.rows * world.size // (2 if loss == "dpo" else 1)
    settings = Settings(
        loss,
        units,
        units,
        humanline=humanline,
        dtype="bfloat16",
        max_length=args.length,
        checkpointing=CHECKPOINTING[args.checkpointing],
        compile=args.compile,
    )
    count = args.rows * world.size // 2 * steps
    vocabulary = shape(args.shape).vocab_size
    pairs = drawn_pairs(count, vocabulary, 0.12 * args.length, 0.08 * args.length, args.length)
    return settings, segment(settings, pairs, steps)


def measured(
    name: str,
    args: argparse.Namespace,
    world: World,
    settings: Settings,
    plan: Segment,
    awaited: Future[Planned] | None,
) -> Check:
    """Take steps and compare them with their plan, for which the main rank waits."""
    estimate = on_main(lambda: cast("Future[Planned]", awaited).result())
    if (needed := step_size(estimate.answer)) > estimate.room:
        said = (
            f"needs {needed:.3g} GiB a rank in the smallest microbatches, and {estimate.room:.3g} are there"
        )
        return Check(name, NOT_HERE, said, {"planned_gib": needed, "room_gib": estimate.room})
    settings = replace(settings, microbatch_tokens=estimate.tokens)
    gc.collect()
    policy = random_policy(shape(args.shape), world.device)
    trainer = make_trainer(settings, policy, world)
    score_all(trainer, plan)
    step = Stepper(trainer, plan)
    if world.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.reset_accumulated_memory_stats()
    seconds(step, WARM_UP)
    mean, spread = seconds(step, args.steps)
    peaks, reserved, retries = zip(*gather_objects(memory_taken(world)), strict=True)
    operations, tokens = operations_of(args.shape, settings, plan)
    assert step.watch.waiting is not None
    numbers = {
        "planned_gib": step_size(estimate.answer),
        "peak_gib": max(peaks),
        "reserved_gib": max(reserved),
        "allocator_retries": max(retries),
        "microbatch_tokens": estimate.answer.tokens,
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
    verdict = OK if abs(off) <= TOLERANCE else FAILED
    taken = (
        f"taken {numbers['peak_gib']:.3g} (plan {off:+.1%}), {numbers['reserved_gib']:.3g} with what the "
        f"allocator holds in reserve, which ran out {numbers['allocator_retries']:.0f} times"
    )
    return Check(name, verdict, f"{said}, {taken}", numbers)


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


def operations_of(name: str, settings: Settings, plan: Segment) -> tuple[float, int]:
    """Return (operations of the plan's mean step, its real tokens), without padding and without recomputation
    except the head's (benchmarks.floor)."""
    rows: list[Sequence] = []
    other: list[Sequence] = []
    for i in range(plan.steps):
        batch = mismatched(plan.batch(i), settings.max_length) if settings.loss == "kto" else plan.batch(i)
        rows += [row for e in batch for row in e.rows]
        other += [e.mismatched for e in batch if e.mismatched is not None]
    work = floor(shape(name), rows, other)
    return (work.scored if settings.humanline else work.cached) / plan.steps, sum(
        map(len, rows)
    ) // plan.steps


def planned(
    settings: Settings, plan: Segment, args: argparse.Namespace, world: World, idle: SimpleQueue[Simulations]
) -> Planned:
    """Return ``plan_of`` by one of the idle worker processes. Several plans are made beside each other."""
    simulated = idle.get()
    try:
        return plan_of(settings, plan, args, world, simulated)
    finally:
        idle.put(simulated)


def plan_of(
    settings: Settings, plan: Segment, args: argparse.Namespace, world: World, simulated: Ask
) -> Planned:
    """Return what the memory plan chooses for the heaviest batch of ``plan``, and what it then says of the
    widest microbatch there is."""
    batch = max(map(plan.batch, range(plan.steps)), key=lambda batch: sum(map(row_tokens, batch)))
    hf_config, gpu = shape(args.shape), world.device.type == "cuda"
    asked = MemoryRequest(settings.config(), batch, [], world.size, gpu, hf_config)
    here = gpu_here()
    beside = sum(neighbours(asked.config, world.size, here, []).always.values())
    room = args.room or (here.room - beside if here else float("inf"))
    ask = remembered(simulated, hf_config)
    longest = max(row_tokens(e) for i in range(plan.steps) for e in plan.batch(i))
    tokens = planned_tokens(asked, hf_config, room, ask, longest)
    if tokens is not None:
        cut = with_tokens(asked, tokens)
        trainer, size = trainer_class(cut.config), size_of(cut.config.model, world.size)
        joined = how_rows_are_joined(cut.config, hf_config, gpu)
        dealt = (world.size, size, trainer.rows_per_example, *joined, trainer.work_of(cut.config, hf_config))
        batch = heaviest(plan, lambda batch: widest(batch, *dealt))
        return Planned(tokens, simulated(replace(cut, batch=batch)), room)
    answer = ask(asked)
    if step_size(answer) > room:  # not even the longest example fits
        answer = ask(with_tokens(asked, longest))
    return Planned(tokens, answer, room)


def memory_taken(world: World) -> tuple[float, float, int]:
    """Return the most that this rank's tensors took since the count began, the most that the allocator held,
    both in GiB, and how often it had to give memory back before it could go on; 0 on a CPU."""
    if world.device.type != "cuda":
        return 0.0, 0.0, 0
    retries = torch.cuda.memory_stats().get("num_alloc_retries", 0)
    return torch.cuda.max_memory_allocated() / GIB, torch.cuda.max_memory_reserved() / GIB, retries


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def arguments() -> argparse.Namespace:
    parser = options_of("python -m benchmarks.gpu_step", __doc__)
    parser.add_argument("--shape", default="qwen2.5-1.5b", choices=SHAPE_NAMES)
    parser.add_argument("--losses", nargs="+", default=list(LOSSES), choices=list(LOSSES))
    parser.add_argument("--length", type=int, default=2048, help="most tokens of a row")
    parser.add_argument("--rows", type=int, default=128, help="rows of a step for each rank")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--checkpointing", default="none", choices=list(CHECKPOINTING))
    parser.add_argument("--compile", action="store_true", help="compile the layers")
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
