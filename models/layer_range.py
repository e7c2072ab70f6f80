"""Models with fewer layers than their architecture has, for architectures whose layers repeat."""

from __future__ import annotations

import copy
from dataclasses import dataclass

from transformers import PretrainedConfig

from models.policy import Policy, decoder_blocks

LEAST = 4
"""Smallest number of layers of the smaller model: two first and two last ones."""


@dataclass(frozen=True)
class Layers:
    """How an architecture's layers repeat."""

    count: int
    period: int
    """Each layer is like the one this many layers before it."""

    @property
    def edge(self) -> int:
        """Number of layers at either end of a smaller model that stand for those of the whole one."""
        return max(LEAST // 2, self.period)

    @property
    def few(self) -> tuple[int, int] | None:
        """Two smaller numbers of layers, with which a model ends as the whole model does; None where together
        they are not fewer than the whole model's."""
        below = 2 * self.edge
        below += (self.count - below) % self.period
        above = below + self.period
        return (below, above) if below + above < self.count else None


def layers_of(policy: Policy, found: PretrainedConfig) -> Layers:
    """Return how the layers of ``policy``, which may lie on the meta device, repeat."""
    kinds = getattr(found.get_text_config(), "layer_types", None)
    blocks = decoder_blocks(policy)
    looks = [
        (
            tuple((name, tuple(p.shape), p.requires_grad) for name, p in block.named_parameters()),
            kinds[i] if kinds else None,
        )
        for i, block in enumerate(blocks)
    ]
    count = len(looks)
    period = next(n for n in range(1, count + 1) if looks[n:] == looks[: count - n])
    return Layers(count, period)


def with_layers(found: PretrainedConfig, count: int) -> PretrainedConfig:
    """Return the architecture with its first ``count`` layers alone."""
    made = copy.deepcopy(found)
    text = made.get_text_config()
    every = text.num_hidden_layers
    for key, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == every:
            setattr(text, key, value[:count])
    text.num_hidden_layers = count
    return made
