"""The same model, pairs, batch and optimizer through TRL 1.16 and through this project, float32, one process.

TRL is not a dependency; it goes into an environment of its own, beside the project's requirements:

    python3 -m venv /tmp/trl-venv && /tmp/trl-venv/bin/pip install -r requirements/cpu.txt trl==1.16.0
    /tmp/trl-venv/bin/python -m benchmarks.trl_compare        # dpo, kto, grpo on the preference data
    /tmp/trl-venv/bin/python -m benchmarks.trl_compare --data gsm8k --losses dpo

TRL runs at its best: fused head (its default), fused AdamW, cached reference scores, no gradient
checkpointing, and for DPO both its orders, as given and grouped by length. Both sides get tokenised rows.
DPO's losses are checked to be equal, step by step. For KTO and GRPO only tokens and work are equal, because
the definitions differ: TRL estimates KL over a device's batch, and its GRPO trains on its own samples, so
only its update is timed here, on rows given to it.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, KTOConfig, KTOTrainer

from benchmarks.measure import (
    Sample,
    Variant,
    Work,
    alternate,
    in_fresh_process,
    machine,
    memory_of,
    ratio,
    table,
)
from benchmarks.parts import (
    Pair,
    Settings,
    benchmark_pairs,
    fresh,
    make_trainer,
    random_policy,
    score_all,
    segment,
    shape,
    train,
    trained_tokenizer,
)
from benchmarks.trl_rows import generated, rows_of
from common.options import options_of
from data.batches import Segment
from data.types import Example, Sequence
from models.policy import Policy

TOLERANCE = 1e-4
"""Tolerance for a step's mean DPO loss, nats: float32 sums in another order differ."""


class Prepared:
    """A TRL trainer whose rows are tokenised already."""

    def _prepare_dataset(self, dataset: Dataset, *others: Any) -> Dataset:
        return dataset


class PreparedDPO(Prepared, DPOTrainer):
    pass


class PreparedKTO(Prepared, KTOTrainer):
    pass


class UpdateOfGRPO(GRPOTrainer):
    """TRL's GRPO without its sampling: it is given rows, advantages and reference scores."""

    rows: list[Example]

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        # Each prompt comes num_generations = 2 times in a row: once for each of the two rows of its group.
        made = generated([self.rows[2 * example["index"] + i % 2] for i, example in enumerate(inputs)])
        shape, vocabulary = made["completion_ids"].shape, self.model.config.vocab_size
        return made | {"ref_per_token_logps": torch.full(shape, -math.log(vocabulary))}


def common(settings: Settings, folder: str, grouped: bool = False) -> dict[str, Any]:
    """Return the arguments that make TRL's run the same as ours."""
    return {
        "output_dir": folder,
        "per_device_train_batch_size": settings.micro_size,
        "num_train_epochs": 1,
        "learning_rate": 1e-5,
        "gradient_accumulation_steps": settings.batch_size // settings.micro_size,
        "lr_scheduler_type": "constant",
        "warmup_steps": 0,
        "adam_epsilon": 1e-5,
        "weight_decay": 0.01,
        "optim": "adamw_torch_fused",
        "max_grad_norm": 1.0,
        "gradient_checkpointing": False,
        "bf16": False,
        "use_cpu": True,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "logging_steps": 1,
        "seed": 1,
        "remove_unused_columns": False,
        "train_sampling_strategy": "group_by_length" if grouped else "sequential",
    }


def trl_trainer(
    settings: Settings,
    plan: Segment,
    model: Any,
    tokenizer: PreTrainedTokenizerFast,
    folder: str,
    grouped: bool,
) -> Any:
    """Return TRL's trainer on the rows of ``plan``, in the plan's order."""
    examples = [example for i in range(plan.steps) for example in plan.batch(i)]
    arguments = common(settings, folder, grouped)
    if settings.loss == "grpo":
        return trl_grpo(examples, arguments, model, tokenizer)
    arguments |= {"max_length": None, "precompute_ref_log_probs": True}
    if settings.loss == "dpo":
        rows = [
            row | {"length": max(map(len, example.rows))}
            for row, example in zip(rows_of("dpo", examples), examples, strict=True)
        ]
        trainer, config = PreparedDPO, DPOConfig(beta=0.1, **arguments)
    else:
        rows = rows_of("kto", paired(examples, settings.micro_size))
        trainer, config = PreparedKTO, KTOConfig(beta=0.25, desirable_weight=1.1, **arguments)
    return trainer(model, args=config, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)


def paired(examples: list[Example], size: int) -> list[Example]:
    """Return KTO's examples with mismatched rows as TRL prepares them: each prompt with the completion before
    its own within a device's batch of ``size``."""
    others = [examples[i - 1 if i % size else min(i + size, len(examples)) - 1] for i in range(len(examples))]
    return [
        replace(e, mismatched=Sequence(e.rows[0].prompt_ids, other.rows[0].completion_ids))
        for e, other in zip(examples, others, strict=True)
    ]


def trl_grpo(
    examples: list[Example], arguments: dict[str, Any], model: Any, tokenizer: PreTrainedTokenizerFast
) -> UpdateOfGRPO:
    arguments = {key: value for key, value in arguments.items() if key != "train_sampling_strategy"}
    trainer = UpdateOfGRPO(
        model,
        reward_funcs=lambda completions, **others: [0.0] * len(completions),
        args=GRPOConfig(
            beta=0.0, epsilon=0.15, num_generations=2, loss_type="dapo", shuffle_dataset=False, **arguments
        ),
        train_dataset=Dataset.from_list([{"prompt": "a", "index": i} for i in range(len(examples) // 2)]),
        processing_class=tokenizer,
    )
    trainer.rows = examples
    trainer.beta = 0.01  # set here, or TRL would load a reference model, although its scores are given
    return trainer


def prepare(
    name: str, settings: Settings, pairs: list[Pair], base: Policy, tokenizer: PreTrainedTokenizerFast
) -> Work:
    """Return the timed part for ``ours``, ``ours padded``, ``trl`` or ``trl grouped``; it returns the losses
    if they are comparable."""
    if name.startswith("trl"):
        plan = segment(settings, pairs)
        trainer = trl_trainer(
            settings, plan, fresh(base).model, tokenizer, tempfile.mkdtemp(), name.endswith("grouped")
        )

        def run() -> list[float]:
            trainer.train()
            return [line["loss"] for line in trainer.state.log_history if "loss" in line]

        return run
    settings = Settings(
        settings.loss,
        settings.batch_size,
        settings.micro_size,
        packing=False if name.endswith("padded") else None,
    )
    plan, ours = segment(settings, pairs), make_trainer(settings, fresh(base))
    score_all(ours, plan)
    return partial(train, ours, plan)


def whole(*arguments: Any) -> list[Work]:
    """Return ``prepare`` as one piece, because TRL's trainer does not stop between steps."""
    return [prepare(*arguments)]


def equal_losses(
    settings: Settings, pairs: list[Pair], base: Policy, tokenizer: PreTrainedTokenizerFast
) -> float:
    """Return the largest difference of a step's mean DPO loss, nats. Raises RuntimeError if it exceeds
    rounding."""
    runs: list[Callable[[], Any]] = [
        prepare(name, settings, pairs, base, tokenizer) for name in ("ours", "trl")
    ]
    ours, theirs = (run() for run in runs)
    worst = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
    if worst > TOLERANCE:
        raise RuntimeError(f"losses differ by {worst:.3g} nats: {ours} against {theirs}")
    return worst


def real_share(pairs: list[Pair]) -> float:
    rows: list[Sequence] = [row for pair in pairs for row in pair]
    return sum(map(len, rows)) / (len(rows) * max(map(len, rows)))


def parsed() -> argparse.Namespace:
    parser = options_of("python -m benchmarks.trl_compare", __doc__)
    parser.add_argument("--data", default="hh", help="hh, gsm8k, drawn, or PATH:FORMAT")
    parser.add_argument("--losses", nargs="+", default=["dpo", "kto", "grpo"])
    parser.add_argument("--model", default="small")
    parser.add_argument("--pairs", type=int, default=64)
    parser.add_argument("--batch-pairs", type=int, default=16)
    parser.add_argument("--micro-pairs", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args()


def memory_apart(name: str, settings: Settings, pairs: list[Pair], model: str) -> dict[str, float]:
    """Return the memory of one variant, MiB. For a fresh process."""
    torch.set_num_threads(1)
    base = random_policy(shape(model), torch.device("cpu"))
    return memory_of(prepare(name, settings, pairs, base, trained_tokenizer(["a"], 300)))


def compared(
    args: argparse.Namespace, samples: dict[str, list[Sample]], memory: dict[str, dict[str, float]]
) -> str:
    """Return a table with a row for each variant."""
    rivals = [name for name in samples if name.startswith("trl")]
    lines = [
        [
            name,
            f"{args.pairs / min(s.cpu for s in samples[name]):.2f}",
            *(str(ratio(samples[rival], samples[name])) for rival in rivals),
            *(str(ratio(samples[rival], samples[name], "wall")) for rival in rivals),
            f"{memory[name]['step']:.0f}",
            f"{memory[name]['peak']:.0f}",
        ]
        for name in samples
    ]
    cpu, wall = ([f"{kind}: {rival} / this" for rival in rivals] for kind in ("CPU", "wall"))
    return table(["", "pairs / CPU s, best", *cpu, *wall, "MiB of the step", "MiB in all"], lines)


def main() -> None:
    args = parsed()
    torch.set_num_threads(1)
    config = shape(args.model)
    base = random_policy(config, torch.device("cpu"))
    pairs = benchmark_pairs(args.data, args.pairs, config.vocab_size)
    tokenizer = trained_tokenizer(["a"], 300)
    for loss in args.losses:
        rows = 1 if loss == "dpo" else 2
        settings = Settings(loss, args.batch_pairs * rows, args.micro_pairs * rows)
        print(
            f"\n{loss}: {machine()}; {args.pairs} pairs, {args.batch_pairs} a step, {args.micro_pairs} at "
            f"once; {real_share(pairs):.0%} of a grid as wide as the longest row is real",
            flush=True,
        )
        groups = loss == "dpo" and args.pairs > args.micro_pairs  # one batch has one order
        names = ["ours", "ours padded", "trl", *(["trl grouped"] if groups else [])]
        # Memory first: this process holds all variants' models once they are timed.
        step = pairs[: args.batch_pairs]
        memory = {n: in_fresh_process(memory_apart, n, settings, step, args.model) for n in names}
        if loss == "dpo":
            print(f"losses equal to {equal_losses(settings, pairs, base, tokenizer):.1e} nats", flush=True)
        variants: dict[str, Variant] = {n: partial(whole, n, settings, pairs, base, tokenizer) for n in names}
        samples = alternate(variants, args.rounds)
        print(compared(args, samples, memory), flush=True)


if __name__ == "__main__":
    main()
