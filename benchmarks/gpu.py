"""Tokens/s, share of the peak, memory and host syncs of a step on one GPU, in the shapes of published models with random weights.

    python3 -m benchmarks.gpu                                          # Qwen2.5-1.5B's shape, DPO, 2,048 tokens, bfloat16
    python3 -m benchmarks.gpu --shape llama-3-8b --checkpointing --variants cached k=1 --micro-pairs 1
    python3 -m benchmarks.gpu --losses dpo kto grpo --packing

Needs torch, transformers, accelerate and peft alone. Variants: ``cached``, offline from reference scores that are known; ``live``,
offline with a second model in memory that scores each batch as it comes, as other trainers do; ``k=1`` and so on, humanline. The last
lines say whether a step made the host wait for the device (torch.cuda.set_sync_debug_mode), and with --profile where time went.
"""

from __future__ import annotations

import argparse
import gc
import time
from dataclasses import replace
from functools import partial
from statistics import fmean

import benchmarks.standins  # noqa: F401  # isort: skip  # before anything that imports the configuration
import torch

from benchmarks.floor import floor
from benchmarks.measure import Spread, Work, machine, table
from benchmarks.parts import LOSSES, Settings, fixed_pairs, make_trainer, random_policy, score_all, segment, shape
from data.batches import Segment
from data.types import Sequence
from data.views import mismatched
from models.distributed import shard, start
from models.policy import Policy, checkpoint_activations, decoder_blocks
from trainers.basic import BasicTrainer

PEAK = 989e12
"""Dense bfloat16 operations a second of an H100 or H200 by the vendor's datasheet; MFU is counted against it."""
WARM_UP = 2


def make_step(variant: str, name: str, settings: Settings, plan: Segment) -> tuple[BasicTrainer, Work]:
    """(the trainer, what trains its next batch); for ``live`` that includes the second model's forward."""
    world = start()

    def policy() -> Policy:
        made = random_policy(shape(name), world.device)
        if settings.checkpointing:
            checkpoint_activations(decoder_blocks(made))
        return made

    k = int(variant[2:]) if variant.startswith("k=") else None
    trainer = make_trainer(replace(settings, humanline=k is not None, sync_freq=k or 1), policy(), world)
    step = partial(trainer.step, plan)
    if variant == "live":
        other = policy().requires_grad_(False)
        shard(other, decoder_blocks(other), world, getattr(torch, settings.dtype))

        def live_step() -> object:
            at = trainer.progress
            trainer.reference.refresh(other, at.step, [(at.step, trainer.microbatches(plan.batch(at.position)))])
            return step()

        return trainer, live_step
    if k is None:
        score_all(trainer, plan)
    else:
        trainer.reference.refresh(trainer.policy, 0, trainer.upcoming(plan, 0, 0))
    return trainer, step


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds(step: Work, steps: int) -> list[float]:
    """Wall seconds of each of ``steps`` steps, the device idle before and after."""
    out = []
    for _ in range(steps):
        synchronize()
        began = time.perf_counter()
        step()
        synchronize()
        out.append(time.perf_counter() - began)
    return out


def syncs(step: Work) -> str:
    """``none``, or what made the host wait for the device within a step."""
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
        where = "" if frame is None else f" at {frame.tb_frame.f_code.co_filename.rsplit('/', 2)[-1]}:{frame.tb_lineno}"
        return str(error).splitlines()[0] + where
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return "none"


def measure(variant: str, name: str, settings: Settings, plan: Segment, steps: int, peak: float) -> list[str]:
    """A row of the table. Operations are those of real tokens, without any recomputation but the head's (benchmarks.floor)."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    trainer, step = make_step(variant, name, settings, plan)
    seconds(step, WARM_UP)
    k = int(variant[2:]) if variant.startswith("k=") else 1
    took = seconds(step, -(-steps // k) * k)  # whole cycles: only one step of k scores, and it scores for all of them
    mean, spread = fmean(took), Spread.of(took)
    memory = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
    rows = [row for example in plan.batch(0) for row in example.rows]
    other: list[Sequence] = []
    if settings.loss == "kto":
        other = [e.mismatched for e in mismatched(plan.batch(0), settings.max_length) if e.mismatched is not None]
    work = floor(shape(name), rows, other)
    operations = work.cached if variant == "cached" else work.scored
    tokens = sum(map(len, rows))
    stopped = syncs(step) if variant != "live" else ""
    del trainer, step
    return [settings.loss, variant, f"{mean:.3f} ({spread.low:.3f} to {spread.high:.3f})", f"{tokens / mean:,.0f}",
            f"{operations / mean / peak:.1%}", f"{memory:.1f}", stopped]


def profile(variant: str, name: str, settings: Settings, plan: Segment) -> str:
    """Where a warm step spends its time on the device (on the CPU where there is none)."""
    _, step = make_step(variant, name, settings, plan)
    seconds(step, WARM_UP)
    with torch.profiler.profile() as found:
        step()
        synchronize()
    key = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    return found.key_averages().table(sort_by=key, row_limit=25, max_name_column_width=60)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen2.5-1.5b")
    parser.add_argument("--losses", nargs="+", default=["dpo"], choices=list(LOSSES))
    parser.add_argument("--variants", nargs="+", default=["cached", "live", "k=1", "k=4"])
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--length", type=int, default=2048, help="tokens of a row, half of them the completion")
    parser.add_argument("--batch-pairs", type=int, default=16)
    parser.add_argument("--micro-pairs", type=int, default=4)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--packing", action="store_true")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--peak", type=float, default=PEAK, help="operations a second that MFU is counted against")
    parser.add_argument("--profile", action="store_true", help="also print where a step's time goes")
    args = parser.parse_args()
    print(f"{machine()}; {args.shape}, {args.dtype}, rows of {args.length} tokens, {args.batch_pairs} pairs a step, "
          f"{args.micro_pairs} at once, packing {args.packing}, checkpointing {args.checkpointing}")
    rows = []
    for loss in args.losses:
        per_pair = 1 if loss == "dpo" else 2
        settings = Settings(loss, args.batch_pairs * per_pair, args.micro_pairs * per_pair, packing=args.packing, dtype=args.dtype,
                            max_length=args.length, checkpointing=args.checkpointing)
        longest_cycle = max([int(v[2:]) for v in args.variants if v.startswith("k=")], default=1)
        count = args.batch_pairs * (WARM_UP + args.steps + longest_cycle + 1)
        plan = segment(settings, fixed_pairs(count, shape(args.shape).vocab_size, args.length, args.length // 2))
        for variant in args.variants:
            rows.append(measure(variant, args.shape, settings, plan, args.steps, args.peak))
            print(rows[-1], flush=True)
    print(table(["loss", "variant", "s a step, mean (least to most)", "tokens/s", "MFU", "GiB", "host syncs"], rows))
    if args.profile:
        print(profile(args.variants[0], args.shape, settings, plan))


if __name__ == "__main__":
    main()
