"""DPO on the same model, pairs, batch and optimizer through TRL 1.16 and through this project, float32, one thread.

TRL is not a dependency; it goes into an environment of its own, beside the project's requirements:

    python3 -m venv /tmp/trl-venv && /tmp/trl-venv/bin/pip install -r requirements/cpu.txt trl==1.16.0
    /tmp/trl-venv/bin/python -m benchmarks.trl_compare
    /tmp/trl-venv/bin/python -m benchmarks.trl_compare --model smollm2-135m --pairs 8 --batch-pairs 8 --at-once 2

TRL runs at its best: fused head (its default), fused AdamW, cached reference scores, no gradient
checkpointing, and both its orders, as given and grouped by length; a machine's best number of pairs at once
is found by trying some (``--at-once``). Each side runs in processes of its own. Lengths are drawn like those of preference data, and both sides get tokenised rows. Their losses are checked to
be equal, step by step. KTO and GRPO are not compared, because their definitions differ: TRL estimates KL over a
device's batch, and its GRPO samples within the step.
"""  # noqa: E501

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from datasets import Dataset

from benchmarks.measure import ROOT, Sample, machine, peak_rss, ratio, timed
from benchmarks.steps import (
    Settings,
    Stepper,
    drawn_pairs,
    make_trainer,
    random_policy,
    score_all,
    segment_of,
    shape,
)
from common.markdown import table
from common.options import options_of
from data.batches import Segment
from models.policy import Policy

TOLERANCE = 1e-4
"""Tolerance for a step's mean loss, nats: float32 sums in another order differ."""
SIDES = ("ours", "ours padded", "trl", "trl grouped")


@dataclass(frozen=True)
class Found:
    """What a side took."""

    wall: float
    cpu: float
    losses: list[float]
    peak: float
    """MiB of the process"""


# -- in the process of a side ----------------------------------------------------------------------


def measured(side: str, at_once: int, model: str, pairs: int, batch_pairs: int) -> Found:
    """Train one epoch and return what it took; for a fresh process."""
    torch.set_num_threads(1)
    hf_config, packing = shape(model), False if side.endswith("padded") else None
    settings = Settings("dpo", batch_pairs, at_once, packing=packing)
    plan = segment_of(settings, drawn_pairs(pairs, hf_config.vocab_size))
    policy = random_policy(hf_config, torch.device("cpu"))
    if side.startswith("trl"):
        run: Callable[[], list[Any]] = of_trl(settings, plan, policy, side.endswith("grouped"))
    else:
        trainer = make_trainer(settings, policy)
        score_all(trainer, plan)
        run = partial(all_steps, Stepper(trainer, plan))
    losses = list[float]()
    sample = timed(lambda: losses.extend(run()))
    return Found(sample.wall, sample.cpu, losses, peak_rss() / 2**20)


def of_trl(settings: Settings, plan: Segment, policy: Policy, grouped: bool) -> Callable[[], list[float]]:
    """Return what trains TRL's trainer on the rows of ``plan``, in the plan's order, and then has the loss of
    each step."""
    from transformers import AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    class Prepared(DPOTrainer):
        """A trainer whose rows are tokenised already."""

        def _prepare_dataset(self, dataset: Dataset, *others: Any) -> Dataset:
            return dataset

    rows = []
    for chosen, rejected in (example.rows for i in range(plan.steps) for example in plan.batch(i)):
        parts = chosen.prompt_ids, chosen.completion_ids, rejected.completion_ids
        ids = dict(
            zip(("prompt_ids", "chosen_ids", "rejected_ids"), (p.tolist() for p in parts), strict=True)
        )
        rows.append(ids | {"length": max(len(chosen), len(rejected))})
    arguments = DPOConfig(
        output_dir=tempfile.mkdtemp(),
        beta=0.1,
        max_length=None,
        precompute_ref_log_probs=True,
        per_device_train_batch_size=settings.micro_size,
        num_train_epochs=1,
        learning_rate=1e-5,
        gradient_accumulation_steps=settings.batch_size // settings.micro_size,
        lr_scheduler_type="constant",
        warmup_steps=0,
        adam_epsilon=1e-5,
        weight_decay=0.01,
        optim="adamw_torch_fused",
        max_grad_norm=1.0,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        logging_steps=1,
        seed=1,
        remove_unused_columns=False,
        train_sampling_strategy="group_by_length" if grouped else "sequential",
    )
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "assets" / "adder" / "model")
    trainer = Prepared(
        policy.model, args=arguments, train_dataset=Dataset.from_list(rows), processing_class=tokenizer
    )

    def run() -> list[float]:
        trainer.train()
        return [line["loss"] for line in trainer.state.log_history if "loss" in line]

    return run


def all_steps(step: Stepper) -> list[float | None]:
    """Do every step and return their losses."""
    return [step() for _ in range(step.segment.steps)][-1]


# -- beside it -------------------------------------------------------------------------------------


def of_side(side: str, args: argparse.Namespace) -> Found:
    """Return what a side's process found. Raises CalledProcessError where it died."""
    words = ["--side", side, "--at-once", str(args.at_once), "--pairs", str(args.pairs)]
    words += ["--model", args.model, "--batch-pairs", str(args.batch_pairs)]
    command = [sys.executable, "-m", "benchmarks.trl_compare", *words]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return Found(**json.loads(done.stdout.splitlines()[-1]))


def check_equal(ours: list[float], theirs: list[float]) -> None:
    """Raise RuntimeError for losses that differ by more than rounding."""
    worst = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
    if worst > TOLERANCE:
        raise RuntimeError(f"losses differ by {worst:.3g} nats: {ours} against {theirs}")


def rows_of(found: dict[str, list[Found]], pairs: int) -> Iterator[list[str]]:
    """Yield the row of each side."""
    samples = {side: [Sample(f.wall, f.cpu) for f in of] for side, of in found.items()}
    for side, of in found.items():
        ratios = (str(ratio(samples[side], samples["ours"], clock)) for clock in ("cpu", "wall"))
        best = f"{pairs / min(f.cpu for f in of):.2f}"
        yield [side, best, *ratios, f"{max(f.peak for f in of):.0f}"]


def main() -> None:
    parser = options_of("python -m benchmarks.trl_compare", __doc__)
    parser.add_argument("--model", default="small", help="tiny, small, smollm2-135m or qwen2.5-1.5b")
    parser.add_argument("--pairs", type=int, default=64)
    parser.add_argument("--batch-pairs", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--at-once", type=int, default=4, help="pairs in one pass of every side")
    parser.add_argument("--side", choices=SIDES, help="measure this side alone, in this process")
    args = parser.parse_args()
    if args.side is not None:
        one = measured(args.side, args.at_once, args.model, args.pairs, args.batch_pairs)
        print(json.dumps(asdict(one)))
        return
    print(f"{machine()}; {args.pairs} pairs, {args.batch_pairs} a step, {args.at_once} at once", flush=True)
    found: dict[str, list[Found]] = {side: [] for side in SIDES}
    for _ in range(args.rounds):
        for side in SIDES:
            found[side].append(of_side(side, args))
    check_equal(found["ours"][0].losses, found["trl"][0].losses)
    head = ["", "pairs / CPU s, best", "CPU: this / ours", "wall: this / ours", "MiB of the process"]
    print(table(head, rows_of(found, args.pairs)))


if __name__ == "__main__":
    main()
