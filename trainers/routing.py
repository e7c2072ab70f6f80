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
in that forward; with several (model.microbatches) it runs one more forward of the whole batch,
without gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from data.batches import to_device
from data.types import Microbatch, Sequences
from models.distributed import sum_over_ranks
from models.policy import Policy, causal_lm
from models.reference import score
from trainers.losses.base import Mean

Routed = list[tuple[Tensor, ...]]
"""One entry per forward: the logits [B L, E] of each mixture layer's router"""
Add = Callable[[Tensor, Sequences], Tensor]
"""Add to the loss of a microbatch its share of another loss."""


class RouterBalance:
    """Auxiliary loss of a policy's routers: each step computes its microbatches inside ``over``.
    ``coefficient``: None for no such loss."""

    def __init__(self, policy: Policy, coefficient: float | None, ranks: int) -> None:
        self.policy, self.coefficient, self.ranks = policy, coefficient, ranks

    @contextmanager
    def over(self, batch: list[Microbatch], log: Callable[[dict[str, Mean]], None]) -> Iterator[Add]:
        """Count the choices in this rank's microbatches of a global batch, and yield the function that adds
        to a microbatch's loss its share of L, once its forward has run with gradient. ``log`` gets L's value.
        Every rank calls it, with the same number of microbatches."""
        if (coefficient := self.coefficient) is None:
            yield lambda total, sequences: total
            return
        counts = self._counts([micro.sequences for micro in batch])
        with self.policy.routed() as routed:

            def add(total: Tensor, sequences: Sequences) -> Tensor:
                part = self._part(sequences, routed, counts)
                routed.clear()
                share = torch.full_like(part.detach(), 1.0 / (len(batch) * self.ranks))
                log({"router_aux_loss": Mean(part.detach(), share)})
                return total + part * (self.ranks * coefficient)

            yield add

    @torch.no_grad()
    def _counts(self, batch: list[Sequences]) -> Tensor | None:
        """Return ``_count`` over all microbatches of all ranks; None for one, which is counted in its own
        forward."""
        if len(batch) == 1:
            return None
        counts = []
        for sequences in batch:
            with self.policy.routed() as routed:
                score(self.policy, sequences)
            counts.append(self._count(sequences, routed))
        return sum_over_ranks(torch.stack(counts).sum(dim=0))

    def _part(self, sequences: Sequences, routed: Routed, counts: Tensor | None) -> Tensor:
        """Return [] float32, the share of L that belongs to the microbatch of the first forward in
        ``routed``, with gradient. Over all microbatches and ranks the shares add up to L."""
        layers, real = routed[0], real_tokens(sequences)
        if counts is None:
            counts = sum_over_ranks(self._count(sequences, routed))
        likely = torch.stack(
            [torch.where(real[:, None], x.float().softmax(-1), 0.0).sum(dim=0) for x in layers]
        )
        seen, choices = counts[-1].clamp(min=1), counts[:-1]
        return (len(choices) * (choices / seen * (likely.sum(dim=0) / seen)).sum()).float()

    @torch.no_grad()
    def _count(self, sequences: Sequences, routed: Routed) -> Tensor:
        """Return [E + 1] float64: how often each expert was chosen, then the number of tokens times
        layers."""
        layers, real = routed[0], real_tokens(sequences)
        counts = torch.zeros(layers[0].shape[-1] + 1, dtype=torch.float64, device=real.device)
        choices = int(causal_lm(self.policy.model).config.get_text_config().num_experts_per_tok)
        weights = real.double().repeat_interleave(choices)
        for layer in layers:
            counts.index_add_(0, layer.topk(choices, dim=-1).indices.flatten(), weights)
        counts[-1] = real.sum() * len(layers)
        return counts


def real_tokens(sequences: Sequences) -> Tensor:
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
