"""When the reference becomes the policy: humanline's way, the trust region's (for comparison), or never.

| ``sync_mode`` | when | what the loss of step t compares the policy with |
|---|---|---|
| ``humanline`` | before the update of every k-th step (paper C.2.1) | the policy of step t - 1 at k = 1: one step behind |
| ``trust_region`` | after the update of every k-th step | at k = 1 the policy itself: DPO's loss is ln 2 for ever |
| ``never`` | at the start alone (of every round) | the initial policy (the round's) |

The trust region's is Gorbatovski et al. 2024, arXiv 2404.09656.

A reference that *is* the policy of some step needs no weights of its own (models.reference). One that only
moves towards it, by ``sync_alpha`` < 1, does: ``SoftReference`` is the one place that holds them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from config.schema import Config


@dataclass(frozen=True)
class Syncing:
    """``every``: k, in steps, None for never. ``after_update``: at the end of a step, when its update has
    been made, or just before it. ``alpha``: how far the reference moves towards the policy, in (0, 1]."""

    every: int | None = None
    after_update: bool = False
    alpha: float = 1.0

    @classmethod
    def from_config(cls, config: Config) -> Syncing:
        if config.syncing == "never" or not config.has_reference:
            return cls()
        return cls(config.sync_freq, config.syncing == "trust_region", config.sync_alpha)

    def due(self, step: int) -> bool:
        """Whether the reference moves at the end of ``step``: at steps 0, k, 2k … before the update, k - 1,
        2k - 1 … after it."""
        return self.every is not None and (step + self.after_update) % self.every == 0

    def last_step_before_sync(self, step: int) -> float:
        """The last step that still sees the reference of ``step``: the next one, from ``step`` on, at whose
        end a sync is due."""
        if self.every is None:
            return math.inf
        return math.ceil((step + self.after_update) / self.every) * self.every - self.after_update


class SoftReference(nn.Module):
    """The weights of a reference that follows the policy slowly: a copy of what is trained (with LoRA, of the
    adapters), sharded like it. A part of the policy's module, so that checkpoints have it; no part of the
    exported model."""

    def __init__(self, policy: nn.Module) -> None:
        super().__init__()
        for name, parameter in policy.named_parameters():
            if parameter.requires_grad:
                self.register_buffer(_flat(name), parameter.detach().clone())

    @torch.no_grad()
    def follow(self, policy: nn.Module, alpha: float) -> None:
        """reference <- alpha policy + (1 - alpha) reference; exactly the policy at ``alpha`` 1."""
        for mine, parameter in self._pairs(policy):
            mine.lerp_(parameter, alpha)

    @contextmanager
    def in_place_of(self, policy: nn.Module) -> Iterator[None]:
        """The policy with these weights for as long as the context lasts, bit for bit its own again after it.
        Weights change places one tensor at a time, so that no third copy is ever held."""
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
    """A buffer's name has no dots."""
    return name.replace(".", "/")
