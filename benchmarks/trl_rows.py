"""This project's examples as TRL takes them, for its trainers' sides of a comparison."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from data.types import Example


def rows_of(loss: str, examples: Sequence[Example]) -> list[dict[str, Any]]:
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


def generated(batch: Sequence[Example]) -> dict[str, Tensor]:
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
