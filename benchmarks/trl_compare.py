"""DPO on the same model, pairs, batch and optimizer through TRL 1.16 and through this project, float32, one thread.

TRL is not a dependency; it goes into an environment of its own, beside the project's requirements:

    python3 -m venv /tmp/trl-venv && /tmp/trl-venv/bin/pip install -r requirements/cpu.txt trl==1.16.0
    /tmp/trl-venv/bin/python -m benchmarks.trl_compare
    /tmp/trl-venv/bin/python -m benchmarks.trl_compare --model smollm2-135m --pairs 8 --batch-pairs 8

TRL runs at its best: fused head (its default), fused AdamW, cached reference scores, no gradient
checkpointing, and both its orders, as given and grouped by length. Each side runs in processes of its
own. It first tries one batch with 1, 2, 4, ... pairs at once, and keeps the number that took least; more are
not tried once a process died or took more than ``--memory``. Every measure is printed when it is made.
Lengths are drawn like those of preference data, and both sides get tokenised rows. Their losses are checked to
be equal, step by step. KTO and GRPO are not compared, because their definitions differ: TRL estimates KL over a
device's batch, and its GRPO samples within the step.
"""  # noqa: E501

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import psutil  # type: ignore[import-untyped]  # accelerate brings it
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
KIN = {"ours": "ours", "ours padded": "ours", "trl": "trl", "trl grouped": "trl"}
"""Side -> the side whose number of pairs at once it takes."""
POLL = 0.1
"""Seconds between two looks at the memory of a side's process."""
MOST = 0.9 * psutil.virtual_memory().available / 2**20
"""Nine tenths of the MiB that this machine can give."""


@dataclass(frozen=True)
class Found:
    """What a side took."""

    wall: float
    cpu: float
    losses: list[float]
    step: float
    """MiB that the steps added"""
    peak: float
    """MiB of the process"""

    def text(self, pairs: int) -> str:
        return f"{pairs / self.cpu:.3g} pairs a CPU s, {self.step:,.0f} MiB for it, {self.peak:,.0f} in all"


# -- in the process of a side ----------------------------------------------------------------------


def measured(side: str, at_once: int, model: str, pairs: int, batch_pairs: int) -> Found:
    """Train one epoch and return what it took; for a fresh process."""
    torch.set_num_threads(1)
    hf_config, packing = shape(model), False if side.endswith("padded") else None
    settings = Settings("dpo", batch_pairs, at_once, packing=packing)
    plan = segment_of(settings, drawn_pairs(pairs, hf_config.vocab_size))
    policy = random_policy(hf_config, torch.device("cpu"))
    if KIN[side] == "trl":
        run: Callable[[], list[Any]] = of_trl(settings, plan, policy, side.endswith("grouped"))
    else:
        trainer = make_trainer(settings, policy)
        score_all(trainer, plan)
        run = partial(all_steps, Stepper(trainer, plan))
    before, losses = psutil.Process().memory_info().rss, list[float]()
    sample = timed(lambda: losses.extend(run()))
    return Found(sample.wall, sample.cpu, losses, (peak_rss() - before) / 2**20, peak_rss() / 2**20)


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


def of_side(words: list[str], memory: float) -> Found | str:
    """Return what a side's process found, or how it died. ``memory``: MiB that it may take."""
    command = [sys.executable, "-m", "benchmarks.trl_compare", *words]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        looked_at = psutil.Process(process.pid)
        while process.poll() is None:
            if looked_at.memory_info().rss > memory * 2**20:
                process.kill()
                return f"took more than {memory:,.0f} MiB"
            time.sleep(POLL)
        assert process.stdout is not None
        lines = process.stdout.read().splitlines()
    if process.returncode != 0:
        return f"died with exit code {process.returncode}"
    return Found(**json.loads(lines[-1]))


class Comparison:
    """Every side on the same rows. ``lines`` yields the text as it is found."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.at_once: dict[str, int] = {}
        self.found: dict[str, list[Found]] = {}

    def side(self, side: str, at_once: int, pairs: int) -> Found | str:
        words = ["--side", side, "--at-once", str(at_once), "--pairs", str(pairs)]
        words += ["--model", self.args.model, "--batch-pairs", str(self.args.batch_pairs)]
        return of_side(words, self.args.memory)

    def lines(self) -> Iterator[str]:
        for side in ("ours", "trl"):
            yield from self.tried(side)
        sides = [side for side in KIN if KIN[side] in self.at_once]
        for _ in range(self.args.rounds):
            for side in list(sides):
                found = self.side(side, self.at_once[KIN[side]], self.args.pairs)
                if isinstance(found, str):
                    sides.remove(side)
                    yield f"{side}: {found}"
                    continue
                self.found.setdefault(side, []).append(found)
                yield f"{side}: {found.text(self.args.pairs)}"
        if {"ours", "trl"} <= set(self.found):
            yield self.equal()
        yield self.table()

    def tried(self, side: str) -> Iterator[str]:
        """Try numbers of pairs at once on one batch, and keep the cheapest."""
        cheapest, at_once = float("inf"), 1
        while at_once <= self.args.batch_pairs:
            found = self.side(side, at_once, self.args.batch_pairs)
            text = found if isinstance(found, str) else found.text(self.args.batch_pairs)
            yield f"{side}, {at_once} pairs at once: {text}"
            if isinstance(found, str):
                return
            if found.cpu < cheapest:
                cheapest, self.at_once[side] = found.cpu, at_once
            at_once *= 2

    def equal(self) -> str:
        """Return how equal the losses are. Raises RuntimeError where that is not rounding."""
        ours, theirs = self.found["ours"][0].losses, self.found["trl"][0].losses
        worst = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
        if worst > TOLERANCE:
            raise RuntimeError(f"losses differ by {worst:.3g} nats: {ours} against {theirs}")
        return f"losses equal to {worst:.1e} nats"

    def table(self) -> str:
        """Return a table with a row for each side that was measured in every round."""
        whole = {side: of for side, of in self.found.items() if len(of) == self.args.rounds}
        samples = {side: [Sample(f.wall, f.cpu) for f in of] for side, of in whole.items()}
        ours = samples.get("ours")
        rows = [
            [
                side,
                str(self.at_once[KIN[side]]),
                f"{self.args.pairs / min(f.cpu for f in of):.2f}",
                *(str(ratio(samples[side], ours, clock)) if ours else "" for clock in ("cpu", "wall")),
                f"{max(f.step for f in of):.0f}",
                f"{max(f.peak for f in of):.0f}",
            ]
            for side, of in whole.items()
        ]
        head = ["", "pairs at once", "pairs / CPU s, best", "CPU: this / ours", "wall: this / ours"]
        return table([*head, "MiB of the steps", "MiB in all"], rows)


def main() -> None:
    parser = options_of("python -m benchmarks.trl_compare", __doc__)
    parser.add_argument("--model", default="small", help="tiny, small, smollm2-135m or qwen2.5-1.5b")
    parser.add_argument("--pairs", type=int, default=64)
    parser.add_argument("--batch-pairs", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--memory", type=float, default=MOST, help="MiB that a side may take")
    parser.add_argument("--side", choices=list(KIN), help="measure this side alone, in this process")
    parser.add_argument("--at-once", type=int, default=1, help="with --side: pairs at once")
    args = parser.parse_args()
    if args.side is not None:
        found = measured(args.side, args.at_once, args.model, args.pairs, args.batch_pairs)
        print(json.dumps(asdict(found)))
        return
    print(f"{machine()}; {args.pairs} pairs, {args.batch_pairs} a step", flush=True)
    for line in Comparison(args).lines():
        print(line, flush=True)


if __name__ == "__main__":
    main()
