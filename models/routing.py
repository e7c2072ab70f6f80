"""Auxiliary loss that keeps the experts of a mixture in use (Fedus et al., 2021, Switch Transformer, arXiv
2101.03961, equations 4 to 6), over the global batch. It follows transformers: all layers together, and k
choices per token.

``L = E sum_e f_e P_e``. E is the number of experts in a layer. f_e is how often a token chooses expert e (0
to 1; over all e they add up to k). P_e is the probability that a token's router gives to expert e. Both are
means over every layer and token: prompts and completions of the rows that the loss is computed on, without
padding and without rows that only fill up the batch. L is k where all experts are chosen equally often.

L is a product of two means, so the sum of L over microbatches would be another loss. But f counts choices,
which have no gradient; once the f of the global batch is known, the rest is a sum over tokens. So f is
counted first, over all microbatches of all ranks, and every microbatch then adds its tokens' share. Value and
gradient are those of the global batch, however it is split. A rank that runs one microbatch per step counts
in that forward; with several (model.gradient_accumulation_steps) it runs one more forward of the whole batch,
without gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig

from common.errors import require
from config.schema_model import ModelConfig
from data.batches import to_device
from data.types import Sequences
from models.distributed import sum_over_ranks
from models.policy import Policy, causal_lm
from models.reference import score

Routed = list[tuple[Tensor, ...]]
"""One entry per forward: the logits [B L, E] of each mixture layer's router"""


def is_mixture(found: PretrainedConfig) -> bool:
    """Return whether this architecture is a mixture of experts with an auxiliary loss of its own, whose
    routing transformers can record."""
    mapping = AutoModelForCausalLM._model_mapping
    records = (
        getattr(mapping[type(found)], "_can_record_outputs", None) or {} if type(found) in mapping else {}
    )
    text = found.get_text_config()
    return "router_logits" in records and all(
        getattr(text, name, None) is not None for name in ("router_aux_loss_coef", "num_experts_per_tok")
    )


def check_routing(config: ModelConfig, found: PretrainedConfig) -> None:
    """Raise ConfigError for an auxiliary loss that does not apply to this model or cannot be computed."""
    key, value = "model.router_aux_loss_coef", config.router_aux_loss_coef
    if value is None:
        return
    require(is_mixture(found), key, value, f"a {found.model_type} has no router to balance; use null")
    require(
        not config.compile,
        key,
        value,
        "needs model.compile=false: compiled layers do not tell how they route",
    )


def routing_notice(config: ModelConfig, found: PretrainedConfig) -> str | None:
    """Return the message about a mixture of experts at the start of a run; None for another model."""
    if not is_mixture(found):
        return None
    own = found.get_text_config().router_aux_loss_coef
    if config.router_aux_loss_coef is None:
        return (
            "a mixture of experts, trained without an auxiliary loss: nothing keeps its experts in use "
            f"(model.router_aux_loss_coef; its own config says {own:g})"
        )
    return (
        f"a mixture of experts, its routers' auxiliary loss times {config.router_aux_loss_coef:g} "
        f"(its own config says {own:g})"
    )


class RouterBalance:
    """Auxiliary loss of a policy's routers. Each step calls ``begin``, then for each microbatch a forward
    inside ``watched`` and ``part``."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.choices = int(causal_lm(policy.model).config.get_text_config().num_experts_per_tok)
        self._counts: Tensor | None = None
        self._routed: Routed = []

    @torch.no_grad()
    def begin(self, batch: list[Sequences]) -> None:
        """Count the choices in this rank's microbatches of a global batch. Every rank calls it, with the same
        number of microbatches."""
        self._counts = None
        if len(batch) == 1:
            return
        counts = []
        for sequences in batch:
            with self.policy.routed() as routed:
                score(self.policy, sequences)
            counts.append(self._count(sequences, routed))
        self._counts = sum_over_ranks(torch.stack(counts).sum(dim=0))

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Record the routers' logits of one microbatch's forward, with gradient."""
        with self.policy.routed() as self._routed:
            yield

    def part(self, sequences: Sequences) -> Tensor:
        """Return [] float32, the share of L that belongs to the microbatch of the last watched forward, with
        gradient. Over all microbatches and ranks the shares add up to L."""
        (layers,), real = self._routed, own_tokens(sequences)
        counts = self._counts
        if counts is None:
            counts = sum_over_ranks(self._count(sequences, self._routed))
        self._routed = []
        likely = torch.stack(
            [torch.where(real[:, None], x.float().softmax(-1), 0.0).sum(dim=0) for x in layers]
        )
        seen, choices = counts[-1].clamp(min=1), counts[:-1]
        return (len(choices) * (choices / seen * (likely.sum(dim=0) / seen)).sum()).float()

    @torch.no_grad()
    def _count(self, sequences: Sequences, routed: Routed) -> Tensor:
        """Return [E + 1] float64: how often each expert was chosen, then the number of tokens times
        layers."""
        (layers,), real = routed, own_tokens(sequences)
        counts = torch.zeros(layers[0].shape[-1] + 1, dtype=torch.float64, device=real.device)
        weights = real.double().repeat_interleave(self.choices)
        for layer in layers:
            counts.index_add_(0, layer.topk(self.choices, dim=-1).indices.flatten(), weights)
        counts[-1] = real.sum() * len(layers)
        return counts


def own_tokens(sequences: Sequences) -> Tensor:
    """Return [B L] bool, the tokens of rows, prompts included, without padding and without rows that only
    fill up the batch."""
    lengths = torch.tensor([len(row) if len(row.completion_ids) else 0 for row in sequences.rows])
    device = sequences.input_ids.device
    if sequences.position_ids is None:
        width = sequences.input_ids.shape[1]
        real = torch.arange(width) < lengths[:, None]
    else:
        real = (lengths > 0).repeat_interleave(lengths.clamp(min=1))
    return to_device(real.flatten(), device)
