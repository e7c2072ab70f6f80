"""Training steps of one recipe, or of settings typed, with random weights and rows: tokens a second, MFU, and
the peak of memory beside the estimate.

    python -m benchmarks.gpu experiment=dpo-offline-humanline
    python -m benchmarks.gpu model=qwen2.5-1.5b-instruct loss=kto humanline=true model.batch_size=128
    torchrun --nproc-per-node 8 -m benchmarks.gpu --steps 8 experiment=grpo-offline
    python -m benchmarks.gpu model=adder loss=dpo                   # the same code without a GPU

The words after the options are those of train.py. The model's shape is read without a network where a recipe
names it. A row has about a fifth of model.max_length tokens on average. Rounds are not sampled: an online
recipe trains on such rows too. Batches are cut, and layers computed again, as a run with these settings does.
MFU counts neither padding nor what is computed again, but for the head.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from transformers import PretrainedConfig

from benchmarks.measure import Spread, Work, machine
from benchmarks.steps import Stepper, drawn_pairs, forward, rows_of, score_all, segment
from common.errors import UserError
from common.options import options_of
from config.schema import Config
from data.batches import Segment
from data.views import mismatched
from launch.composing import compose_config
from memory.decisions import PlannedSettings, measured
from models.distributed import World, on_main, start, stop
from models.policy import Policy, decoder_blocks
from models.pretrained import load_policy
from models.shapes import architecture
from models.sharding import shard
from trainers.assembly import make_loss, trainer_class

PEAK = 989e12
"""Dense bfloat16 operations a second of an H100 or H200 by the vendor's datasheet; MFU is relative to it."""
WARM_UP = 2


@dataclass(frozen=True)
class Measured:
    """What some steps took."""

    seconds: float
    """of a step, from an idle device to an idle device"""
    spread: Spread
    """seconds of single steps"""
    tokens: float
    """of the rows that a step trains on"""
    operations: float
    """of a step"""
    balance: float
    """share of a step in which no rank waits for another, by its operations"""

    def text(self, ranks: int, peak: float) -> str:
        mfu = self.operations / self.seconds / peak / ranks
        return (
            f"{self.tokens / self.seconds:,.0f} tokens/s, MFU {mfu:.1%}; {self.tokens:,.0f} tokens a step in "
            f"{self.seconds:.3f} s (longest {self.spread.high:.3f}), balance {self.balance:.2f}"
        )


def steps_of(config: Config, hf_config: PretrainedConfig, steps: int) -> Segment:
    """Return drawn batches for so many steps, and for one more: a sync at the last scores the batch after
    it."""
    rows, longest = trainer_class(config).rows_per_example, config.model.max_length
    units = config.model.batch_size * (steps + 1)
    vocabulary = hf_config.get_text_config().vocab_size
    pairs = drawn_pairs(-(-units * rows // 2), vocabulary, 0.12 * longest, 0.08 * longest, longest)
    return segment(pairs, rows, config.model.batch_size, steps + 1)


@contextmanager
def random_weights(config: Config, hf_config: PretrainedConfig) -> Iterator[Config]:
    """Yield the settings of a run from random weights in the shape of ``hf_config``."""
    with tempfile.TemporaryDirectory() as folder:
        hf_config.save_pretrained(folder)
        names: dict[str, Any] = {"name_or_path": folder, "tokenizer_name_or_path": None, "revision": None}
        yield replace(config, model=replace(config.model, from_config=True, **names))


def random_policy(config: Config, world: World) -> Policy:
    """Return the policy with random weights, made on each rank's device and then sharded."""
    with world.device:
        policy = load_policy(config.model, world.device, config.seed)
    dtype = getattr(torch, config.model.dtype)
    shard(policy, decoder_blocks(policy), world, dtype, config.model.shards_again)
    return policy


def timed(step: Work, steps: int) -> tuple[float, Spread]:
    """Return (mean, spread) of ``steps`` steps, seconds. The host runs ahead of the device, as in training.
    The mean is wall time from an idle device to an idle device; the spread is measured by the device's own
    clock between the ends of steps (by the host's clock without a device)."""
    marks: list[torch.cuda.Event] = []
    ends: list[float] = []
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    wait()
    began = time.perf_counter()
    for i in range(steps + 1):
        if i:
            step()
        ends.append(time.perf_counter())
        if torch.cuda.is_available():
            marks.append(torch.cuda.Event(enable_timing=True))
            marks[-1].record()
    wait()
    mean = (time.perf_counter() - began) / steps
    if marks:
        return mean, Spread.of(a.elapsed_time(b) / 1e3 for a, b in pairwise(marks))
    return mean, Spread.of(b - a for a, b in pairwise(ends))


def operations_of(config: Config, hf_config: PretrainedConfig, plan: Segment) -> float:
    """Return the operations of the plan's mean step: the policy's forward and backward, the reference's
    forward where it is synced, and both for the mismatched rows of KTO."""
    rows = forward(hf_config, rows_of(plan))
    synced = config.has_reference and config.syncing != "never"
    needed = rows.training + synced * rows.scoring
    if config.loss["name"] == "kto":
        examples = [e for i in range(plan.steps) for e in mismatched(plan.batch(i), config.model.max_length)]
        other = forward(hf_config, [e.mismatched for e in examples if e.mismatched is not None])
        needed += (1 + synced) * other.scoring
    return needed / plan.steps


def measure(config: Config, hf_config: PretrainedConfig, world: World, steps: int) -> Iterator[str]:
    """Train, and yield what is found in words."""
    plan = steps_of(config, hf_config, WARM_UP + steps)
    planned = PlannedSettings(config, plan, [], trainer_class(config), world)
    policy = random_policy(config, world)
    said: list[str] = []
    config = planned.apply(policy, said.append)
    yield from said
    trainer = trainer_class(config)(config, policy, make_loss(config), world)
    if config.has_reference:
        score_all(trainer, plan)
    step = Stepper(trainer, plan)
    timed(step, WARM_UP)
    if world.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.reset_accumulated_memory_stats()
    seconds, spread = timed(step, steps)
    assert step.waiting is not None
    found = Measured(
        seconds,
        spread,
        sum(map(len, rows_of(plan))) / plan.steps,
        operations_of(config, hf_config, plan),
        step.waiting.known["token_balance"],
    )
    yield found.text(world.size, PEAK)
    taken = measured(world, planned.record["predicted_gib"])["measured"]
    yield f"peak: {taken}; estimate: {planned.record['predicted']}"
    if world.device.type == "cuda":
        retries = torch.cuda.memory_stats().get("num_alloc_retries", 0)
        held = torch.cuda.max_memory_reserved() / 2**30
        yield f"the allocator held {held:.1f} GiB and ran out {retries} times"


def arguments() -> argparse.Namespace:
    parser = options_of("python -m benchmarks.gpu", __doc__)
    parser.add_argument("--steps", type=int, default=4, help=f"timed steps, after {WARM_UP} others")
    parser.add_argument("settings", nargs="*", help="words of train.py, as in experiment=dpo-offline")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    world = start()
    say = partial(print, flush=True) if world.is_main else lambda _: None
    try:
        config = on_main(lambda: compose_config(args.settings))
        hf_config = architecture(config.model)
        say(f"{machine()}; {world.size} rank(s)")
        with random_weights(config, hf_config) as of_run:
            for line in measure(of_run, hf_config, world, args.steps):
                say(line)
    except UserError as error:
        raise SystemExit(f"error: {error}") from None
    finally:
        stop()


if __name__ == "__main__":
    main()
