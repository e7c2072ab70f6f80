"""Policies with a different head, a critic beside the language model's head or a reward instead of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from common.errors import ConfigError
from data.batches import to_device
from data.types import Sequences
from models.policy import Policy, causal_lm, on_grid, output_head

if TYPE_CHECKING:
    from peft import PeftModel


class ValuePolicy(Policy):
    """A policy with a value head, offline PPO's critic, on the hidden states that its language model head
    reads.

    The value head starts at 0 and reads the states detached: it learns from the policy's features and does
    not change them.
    """

    def __init__(self, model: PreTrainedModel | PeftModel) -> None:
        super().__init__(model)
        weight = output_head(model).weight
        self.value_head = nn.Linear(weight.shape[1], 1, device=weight.device, dtype=torch.float32)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)

    def forward(self, sequences: Sequences, entropy: bool = False, values: bool = False) -> Tensor:
        """Return [R, T] as ``Policy.forward``; with ``values`` [2, R, T], the log-probabilities and the
        values of the states before each completion token."""
        if not values:
            return super().forward(sequences, entropy)
        before = self.hidden(sequences).index_select(0, sequences.predict)
        head = self.value_head
        value = before.detach().float() @ head.weight[0].float() + head.bias.float()
        return torch.stack([self.logprobs(sequences, before), on_grid(sequences, value)])


class RewardModel(Policy):
    """A sequence classifier with one label, whose reward is read at the last token of a row, its end-of-turn
    token.

    Any policy's trainer can run it: it takes the place of a Policy, with rewards instead of
    log-probabilities.
    """

    def forward(self, sequences: Sequences, entropy: bool = False) -> Tensor:
        """Return [R, T] float32: the row's reward at its last completion token and 0 elsewhere, so that a
        row's sum is its reward."""
        width = sequences.input_ids.shape[1]
        lengths = torch.tensor([max(len(row), 1) for row in sequences.rows])
        packed = sequences.position_ids is not None
        last = lengths.cumsum(0) - 1 if packed else torch.arange(len(lengths)) * width + lengths - 1
        hidden = self.hidden(sequences).index_select(0, to_device(last, sequences.mask.device))
        rewards = hidden.float() @ score_head(self.model).weight[0].float()
        at_end = (
            torch.arange(sequences.mask.shape[1], device=hidden.device)
            == sequences.mask.sum(-1, keepdim=True) - 1
        )
        return torch.where(at_end, rewards[:, None], 0.0)

    def check_head(self) -> None:
        """Raise ConfigError unless the classifier's head is the one that ``forward`` expects."""
        score_head(self.model)


def score_head(model: PreTrainedModel | PeftModel) -> nn.Linear:
    """Return the head of a sequence classifier. Raises ConfigError unless it is one linear layer without bias
    and with one label."""
    head = getattr(causal_lm(model), "score", None)
    if not (type(head) is nn.Linear and head.bias is None and head.out_features == 1):
        raise ConfigError(
            "model.name_or_path",
            type(causal_lm(model)).__name__,
            "its classifier's head is not one linear layer called "
            "score with one label: no reward model can be made of it here",
        )
    return head
