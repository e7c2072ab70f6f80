"""Training steps of one recipe, or of settings typed, with random weights and rows: tokens a second, MFU, and
the peak of memory beside the estimate.

    python -m benchmarks.gpu experiment=dpo-offline-humanline
    python -m benchmarks.gpu model=qwen2.5-1.5b-instruct loss=kto humanline=true model.batch_size=128
    torchrun --nproc-per-node 8 -m benchmarks.gpu --steps 8 experiment=grpo-offline
    python -m benchmarks.gpu model=adder loss=dpo                   # the same code without a GPU

The words after the options are those of train.py. The model's shape is read without a network where a recipe
names it. A row has about a fifth of model.max_length tokens on average. Rounds are not sampled: an online
recipe trains on such rows too. Batches are cut, and layers computed again, as a run with these settings does.
MFU counts neither padding nor what is computed again.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from transformers import PretrainedConfig

from benchmarks.measure import Work, machine
from benchmarks.steps import Stepper, drawn_pairs, operations, rows_of, score_all, segment
from common.errors import UserError
from common.options import options_of
from config.cli import compose_config
from config.schema import CARDS, Config
from data.batches import Segment
from jobs.memory import measured, plan_run
from models.distributed import World, on_main, start, stop
from models.policy import decoder_blocks
from models.pretrained import load_policy
from models.shapes import architecture
from models.sharding import shard
from trainers.assembly import make_loss, trainer_class

PEAK = CARDS["H100"][1]
"""Dense bfloat16 operations a second of an H100 or H200; MFU is relative to it."""
WARM_UP = 2


def steps_of(config: Config, hf_config: PretrainedConfig, steps: int) -> Segment:
    """Return drawn batches for so many steps, and for one more: a sync at the last scores the batch after
    it."""
    rows, longest = trainer_class(config).rows_per_example, config.model.max_length
    units = config.model.batch_size * (steps + 1)
    vocabulary = hf_config.get_text_config().vocab_size
    pairs = drawn_pairs(-(-units * rows // 2), vocabulary, 0.12 * longest, 0.08 * longest, longest)
    return segment(pairs, rows, config.model.batch_size, steps + 1)


def timed(step: Work, steps: int) -> float:
    """Return the mean seconds of ``steps`` steps, from an idle device to an idle device. The host runs ahead
    of the device, as in training."""

    def wait() -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    wait()
    began = time.perf_counter()
    for _ in range(steps):
        step()
    wait()
    return (time.perf_counter() - began) / steps


def measure(config: Config, hf_config: PretrainedConfig, world: World, steps: int) -> Iterator[str]:
    """Train a model with random weights in the shape of ``hf_config``, made on each rank's device and then
    sharded, and yield what is found in words."""
    plan = steps_of(config, hf_config, WARM_UP + steps)
    planned = on_main(lambda: plan_run(config, plan, [], world.size))
    yield planned.text
    config = planned.applied(config)
    with world.device:
        policy = load_policy(config.model, world.device, config.seed)
    dtype = getattr(torch, config.model.dtype)
    shard(policy, decoder_blocks(policy), world, dtype, config.model.reshard_after_forward)
    trainer = trainer_class(config)(config, policy, make_loss(config), world)
    if config.has_reference:
        score_all(trainer, plan)
    step = Stepper(trainer, plan)
    timed(step, WARM_UP)
    if world.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = timed(step, steps)
    assert step.waiting is not None
    tokens = sum(map(len, rows_of(plan))) / plan.steps
    synced = config.has_reference and config.syncing != "never"
    needed = operations(hf_config, plan, config.loss["name"], config.model.max_length, synced)
    mfu = needed / plan.steps / seconds / PEAK / world.size
    yield (
        f"{tokens / seconds:,.0f} tokens/s, MFU {mfu:.1%}; {tokens:,.0f} tokens a step in {seconds:.3f} s, "
        f"balance {step.waiting.known['token_balance']:.2f}"
    )
    yield f"peak: {measured(world, planned)['measured']}; estimate: {planned.record['predicted']}"


def main() -> None:
    parser = options_of("python -m benchmarks.gpu", __doc__)
    parser.add_argument("--steps", type=int, default=4, help=f"timed steps, after {WARM_UP} others")
    parser.add_argument("settings", nargs="*", help="words of train.py, as in experiment=dpo-offline")
    options = parser.parse_args()
    world = start()
    say = partial(print, flush=True) if world.is_main else lambda _: None
    try:
        config = on_main(lambda: compose_config(options.settings))
        hf_config = architecture(config.model)
        say(f"{machine()}; {world.size} rank(s)")
        with tempfile.TemporaryDirectory() as folder:
            hf_config.save_pretrained(folder)
            where = {"name_or_path": folder, "tokenizer_name_or_path": None, "revision": None}
            model = replace(config.model, from_config=True, **where)  # type: ignore[arg-type]
            for line in measure(replace(config, model=model), hf_config, world, options.steps):
                say(line)
    except UserError as error:
        raise SystemExit(f"error: {error}") from None
    finally:
        stop()


if __name__ == "__main__":
    main()
