"""Weights of a reference that only moves towards the policy, or outlives a round, and the initial weights
that the KL term of a round needs. This is the only place that holds a second copy of the weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class SoftReference(nn.Module):
    """Weights of a reference that follows the policy slowly: a copy of the trained weights (with LoRA, of the
    adapters), sharded like them. The copy is part of the policy's module, so that checkpoints include it, but
    not of the exported model."""

    def __init__(self, policy: nn.Module) -> None:
        super().__init__()
        for name, parameter in policy.named_parameters():
            if parameter.requires_grad:
                self.register_buffer(_flat(name), parameter.detach().clone())

    @classmethod
    def part_of(cls, policy: nn.Module) -> SoftReference:
        """Return a copy that is added to the policy's module."""
        reference = cls(policy)
        policy.add_module("soft_reference", reference)
        return reference

    @torch.no_grad()
    def follow(self, policy: nn.Module, alpha: float) -> None:
        """Set reference <- alpha policy + (1 - alpha) reference; with ``alpha`` 1 it is exactly the
        policy."""
        for mine, parameter in self._pairs(policy):
            mine.lerp_(parameter, alpha)

    @contextmanager
    def in_place_of(self, policy: nn.Module) -> Iterator[None]:
        """Give the policy these weights for as long as the context lasts; after it the policy has its own
        again, bit for bit. Weights are swapped one tensor at a time, so that no third copy is ever held."""
        self._swap(policy)
        try:
            yield
        finally:
            self._swap(policy)

    @torch.no_grad()
    def _swap(self, policy: nn.Module) -> None:
        for mine, parameter in self._pairs(policy):
            held = parameter.detach().clone()
            parameter.copy_(mine)
            mine.copy_(held)

    def _pairs(self, policy: nn.Module) -> Iterator[tuple[Tensor, nn.Parameter]]:
        buffers = dict(self.named_buffers())
        return ((buffers[_flat(name)], p) for name, p in policy.named_parameters() if p.requires_grad)


def _flat(name: str) -> str:
    """Return ``name`` as a buffer's name, which must not have dots."""
    return name.replace(".", "/")
