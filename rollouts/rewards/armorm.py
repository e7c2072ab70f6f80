"""ArmoRM, the paper's reward model. Source: Wang et al. 2024, arXiv 2406.12845.

The model is a Llama whose last token's hidden state is regressed on 19 objectives. A gating network weights
the objectives from the prompt alone. This project has its own class because the checkpoint's code does not
import on transformers 5. Module names are the checkpoint's.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaModel, LlamaPreTrainedModel, PretrainedConfig, PreTrainedModel

from common.errors import ConfigError
from data.types import Sequence as Row
from rollouts.rewards.models import ModelReward, Place, padded
from rollouts.rewards.settings import RewardModelConfig

N_OBJECTIVES, TEMPERATURE, HIDDEN, N_HIDDEN = 19, 10.0, 1024, 3
"""Values of the published checkpoint, used where its config does not give them."""


class Gating(nn.Module):
    """The gating network: an MLP with ReLU, a softmax with temperature, and a scale."""

    def __init__(
        self, features: int, objectives: int, temperature: float, hidden: int, n_hidden: int
    ) -> None:
        super().__init__()
        widths = [features, *[hidden] * n_hidden, objectives]
        self.temperature = temperature
        self.logit_scale = nn.Parameter(torch.ones(1))
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))

    def forward(self, x: Tensor) -> Tensor:
        """Map [R, features] hidden states to [R, K] weights of the objectives."""
        for layer in self.layers[:-1]:
            x = torch.relu(layer(x))
        return torch.softmax(self.layers[-1](x) / self.temperature, dim=-1) * self.logit_scale


class ArmoRM(LlamaPreTrainedModel):
    """The whole model. Its head is float32 whatever the backbone's dtype, because rewards differ in the third
    digit and bf16 has two."""

    _keep_in_fp32_modules_strict: ClassVar[list[str]] = [  # type: ignore[misc]
        "regression_layer",
        "gating",
        "reward_transform_matrix",
    ]

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        extra = config.to_dict()
        objectives = extra.get("num_objectives", N_OBJECTIVES)
        self.model = LlamaModel(config)
        self.regression_layer = nn.Linear(config.hidden_size, objectives, bias=False)
        self.reward_transform_matrix = nn.Parameter(torch.eye(objectives), requires_grad=False)
        self.gating = Gating(
            config.hidden_size,
            objectives,
            extra.get("gating_temperature", TEMPERATURE),
            extra.get("gating_hidden_dim", HIDDEN),
            extra.get("gating_n_hidden", N_HIDDEN),
        )
        self.post_init()

    def forward(self, input_ids: Tensor, attention_mask: Tensor, gate: Tensor, last: Tensor) -> Tensor:
        """Return the [R] rewards of R rows, float32. ``input_ids``, ``attention_mask``: [R, L], right padded.
        ``gate``: [R] the position of the end-of-turn token that ends the prompt. ``last``: [R] that of the
        row's last token."""
        hidden = self.model(input_ids, attention_mask=attention_mask, use_cache=False).last_hidden_state
        rows = torch.arange(len(hidden), device=hidden.device)
        rewards = self.regression_layer(hidden[rows, last].float())
        gating: Tensor = self.gating(hidden[rows, gate].float())
        return (gating * (rewards @ self.reward_transform_matrix)).sum(dim=-1)


class ArmoRMHead:
    """Loads ArmoRM and computes its rewards."""

    def __init__(self, end_id: int) -> None:
        self.end_id = end_id
        """the end-of-turn token"""

    def empty(self, hf_config: PretrainedConfig) -> PreTrainedModel:
        if not isinstance(hf_config, LlamaConfig):
            raise ConfigError(
                "reward.armorm.name_or_path",
                hf_config.name_or_path,
                f"is a {hf_config.model_type}, not ArmoRM's Llama",
            )
        return ArmoRM(hf_config)

    def load(self, path: str, config: RewardModelConfig) -> tuple[PreTrainedModel, set[str]]:
        loaded: Any = ArmoRM.from_pretrained(
            path,
            revision=config.revision or "main",
            dtype=getattr(torch, config.dtype),
            output_loading_info=True,
        )
        model, info = loaded
        assert isinstance(model, ArmoRM)
        return model, set(info["missing_keys"])

    def rewards(self, model: PreTrainedModel, rows: Sequence[Row], device: torch.device) -> Tensor:
        ids, mask = padded(rows, 0, device)
        gate = torch.tensor([gate_position(row, self.end_id) for row in rows], device=device)
        last = torch.tensor([len(row) - 1 for row in rows], device=device)
        scores: Tensor = model(ids, mask, gate, last)
        return scores


def gate_position(row: Row, end_id: int) -> int:
    """Return the position at which the gate reads the prompt: its last end-of-turn token, the one before the
    header of the answer.

    The published code searches for ``<|eot_id|>`` and the header of an assistant's turn from the end of the
    whole row. Searching the prompt alone finds the same position, and no text of a completion can move it.
    For a prompt without an end-of-turn token the position is that of its first token.
    """
    positions = (row.prompt_ids == end_id).nonzero()[0]
    return int(positions[-1]) if len(positions) else 0


def make(config: RewardModelConfig, device: torch.device | str, log_dir: Path | None = None) -> ModelReward:
    """The paper's reward model. Raises ConfigError."""
    place = Place(config, "reward.armorm")
    return ModelReward(config, place, ArmoRMHead(place.end_id), device)
