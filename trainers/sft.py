"""Supervised fine-tuning without a reference, on the best completion alone or on both kinds behind control
texts. The loss is a mean over the global batch's completion tokens."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

import numpy as np

from common.errors import require
from config.schema import Config
from data import views
from data.batches import Segment
from data.types import Example, Microbatch, Sequence
from models.pretrained import load_tokenizer
from trainers.basic import BasicTrainer
from trainers.losses.base import LossResult, TokenScores


class SFTTrainer(BasicTrainer[None]):
    view = staticmethod(views.demonstrations)

    def loss_denominator(self, batch: list[Example]) -> int:
        return sum(len(row.counted) for example in batch for row in example.rows)

    def compute_loss(self, micro: Microbatch, scores: TokenScores, prepared: None) -> LossResult:
        return self.loss(scores, **self.numbers(micro))


class ConditionedSFTTrainer(SFTTrainer):
    """Trainer of token-conditioned fine-tuning (Korbak et al., 2023, arXiv 2302.08582): a control text after
    the prompt says whether the completion is good or bad. Both kinds are learned alike. To sample a good
    completion, append the good text to the prompt."""

    view = staticmethod(views.labelled)
    online = False
    labelled_examples = True
    loss_keys = ("control_tokens",)

    @cached_property
    def control(self) -> tuple[np.ndarray, np.ndarray]:
        return control_tokens(self.config)

    @classmethod
    def check(cls, config: Config, segment: Segment) -> None:
        control_tokens(config)

    def arrange(self, batch: list[Example]) -> list[Example]:
        """Append the control tokens to the prompt of every row, so that they are read and not learned."""
        return [replace(e, rows=tuple(self._conditioned(row, e.label) for row in e.rows)) for e in batch]

    def _conditioned(self, row: Sequence, label: float) -> Sequence:
        """Append the control tokens of ``label`` to the row's prompt; a row that gets too long loses the
        beginning of its prompt."""
        control = self.control[0 if label > 0 else 1]
        excess = max(0, len(row) + len(control) - self.config.model.max_length)
        return replace(row, prompt_ids=np.concatenate([row.prompt_ids[excess:], control]))


def control_tokens(config: Config) -> tuple[np.ndarray, np.ndarray]:
    """Return the token ids of loss.control_tokens, chosen and rejected. Raises ConfigError for a text that
    the tokenizer does not know."""
    tokenizer = load_tokenizer(config.model)
    token_ids = []
    for kind in ("chosen", "rejected"):
        text = config.loss["control_tokens"][kind]
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        require(
            bool(ids) and tokenizer.unk_token_id not in ids,
            f"loss.control_tokens.{kind}",
            text,
            f"the tokenizer has no tokens for it; give a text that it knows, or add it: "
            f"'model.new_tokens=[\"{text}\"]'",
        )
        token_ids.append(np.array(ids, dtype=np.int32))
    return token_ids[0], token_ids[1]
