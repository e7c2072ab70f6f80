"""TRL's side of ``benchmarks.trl_compare``: its trainers at their best on this project's rows."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, KTOConfig, KTOTrainer

from benchmarks.steps import Settings
from data.batches import Segment
from data.types import Example, Sequence
from models.policy import Policy


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
        tensors = generated([self.rows[2 * example["index"] + i % 2] for i, example in enumerate(inputs)])
        shape, vocabulary = tensors["completion_ids"].shape, self.model.config.vocab_size
        return tensors | {"ref_per_token_logps": torch.full(shape, -math.log(vocabulary))}


def common(settings: Settings, grouped: bool) -> dict[str, Any]:
    """Return the arguments that make TRL's run the same as ours."""
    return {
        "output_dir": tempfile.mkdtemp(),
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


def prepared(
    settings: Settings, plan: Segment, policy: Policy, tokenizer: PreTrainedTokenizerFast, grouped: bool
) -> Callable[[], list[float]]:
    """Return what trains TRL's trainer on the rows of ``plan``, in the plan's order, and then has the loss of
    each step."""
    examples = [example for i in range(plan.steps) for example in plan.batch(i)]
    arguments = common(settings, grouped)
    if settings.loss == "grpo":
        trainer = grpo(examples, arguments, policy.model, tokenizer)
    else:
        arguments |= {"max_length": None, "precompute_ref_log_probs": True}
        trainer = preferences(settings, examples, arguments, policy.model, tokenizer)

    def run() -> list[float]:
        trainer.train()
        return [line["loss"] for line in trainer.state.log_history if "loss" in line]

    return run


def preferences(
    settings: Settings, examples: list[Example], arguments: dict[str, Any], model: Any, tokenizer: Any
) -> Any:
    """Return TRL's trainer of DPO or KTO."""
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


def grpo(examples: list[Example], arguments: dict[str, Any], model: Any, tokenizer: Any) -> UpdateOfGRPO:
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


# -- rows ------------------------------------------------------------------------------------------


def rows_of(loss: str, examples: Seq[Example]) -> list[dict[str, Any]]:
    """Return the examples of ``dpo`` or ``kto`` as rows with TRL's columns of token ids. KTO's mismatched
    row is there where the example has one."""
    rows = []
    for example in examples:
        first = example.rows[0]
        row: dict[str, Any] = {"prompt_ids": first.prompt_ids.tolist()}
        if loss == "dpo":
            row |= {"chosen_ids": first.completion_ids.tolist()}
            row |= {"rejected_ids": example.rows[1].completion_ids.tolist()}
        else:
            row |= {"completion_ids": first.completion_ids.tolist(), "label": example.label > 0}
        if example.mismatched is not None:
            row["KL_completion_ids"] = example.mismatched.completion_ids.tolist()
        rows.append(row)
    return rows


def generated(batch: Seq[Example]) -> dict[str, Tensor]:
    """Return a batch as GRPOTrainer gets it from its sampling: prompts padded on the left, answers on the
    right, with our advantages."""
    prompts = [torch.tensor(e.rows[0].prompt_ids).long() for e in batch]
    answers = [torch.tensor(e.rows[0].completion_ids).long() for e in batch]
    tensors = {"advantages": torch.tensor([e.label for e in batch])}
    for name, parts, side in (("prompt", prompts, "left"), ("completion", answers, "right")):
        seen = [torch.ones_like(part) for part in parts]
        tensors[f"{name}_ids"] = pad_sequence(parts, batch_first=True, padding_side=side)
        tensors[f"{name}_mask"] = pad_sequence(seen, batch_first=True, padding_side=side)
    return tensors | {"num_items_in_batch": tensors["completion_mask"].sum()}
