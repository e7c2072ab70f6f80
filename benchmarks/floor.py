"""The arithmetic that a step cannot do without; docs/performance.md says where each term comes from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from transformers import PretrainedConfig

from data.types import Sequence


@dataclass(frozen=True)
class Forward:
    """Floating-point operations of one forward over some rows."""

    body: float
    """The blocks' matrix products: 2 per weight and token."""
    attention: float
    """Scores and weighted values under a causal mask: 2 x layers x heads x head size x n^2 for a row of n
    tokens."""
    head: float
    """Logits of the completion tokens alone: 2 x vocabulary x width each."""

    def __add__(self, other: Forward) -> Forward:
        return Forward(self.body + other.body, self.attention + other.attention, self.head + other.head)

    @property
    def scoring(self) -> float:
        """Operations without gradient: one unit of everything."""
        return self.body + self.attention + self.head

    @property
    def training(self) -> float:
        """Operations of forward and backward: three units, and four of the head, whose logits are computed
        again instead of stored."""
        return self.training_on_kept + self.head

    @property
    def training_on_kept(self) -> float:
        """The same where logits stay until the backward (``models.logprobs.keeps_logits``): three units of
        everything."""
        return 3 * (self.body + self.attention + self.head)


def block_weights(config: PretrainedConfig) -> int:
    """Return the number of weights in one decoder block's matrices (Llama and Qwen2: four of attention, three
    of the gated MLP)."""
    width, size = config.hidden_size, head_size(config)
    attention = 2 * width * size * (config.num_attention_heads + config.num_key_value_heads)
    return attention + 3 * width * config.intermediate_size


def head_size(config: PretrainedConfig) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def forward(config: PretrainedConfig, rows: Iterable[Sequence]) -> Forward:
    """Return the operations of one forward over ``rows`` without a padded token."""
    lengths = [(len(row), len(row.completion_ids)) for row in rows]
    tokens, squares, scored = (
        sum(f(n, c) for n, c in lengths) for f in (lambda n, c: n, lambda n, c: n * n, lambda n, c: c)
    )
    layers = config.num_hidden_layers
    return Forward(
        body=2.0 * layers * block_weights(config) * tokens,
        attention=2.0 * layers * config.num_attention_heads * head_size(config) * squares,
        head=2.0 * config.vocab_size * config.hidden_size * scored,
    )


@dataclass(frozen=True)
class Floor:
    """Operations of one pass over the data, by the source of the reference scores."""

    cached: float
    """Offline with known reference scores: policy forward and backward (for KTO, also the policy's forward
    over the mismatched rows)."""
    scored: float
    """The same plus the reference's forward over every row that needs one: offline with its own scoring, and
    humanline at any k."""

    @property
    def ratio(self) -> float:
        return self.scored / self.cached


def floor(
    config: PretrainedConfig,
    rows: Iterable[Sequence],
    mismatched: Iterable[Sequence] = (),
    kept: bool = False,
) -> Floor:
    """Return the floor of one pass over ``rows``. ``kept``: whether logits stay until the backward."""
    policy, other = forward(config, rows), forward(config, mismatched)
    cached = (policy.training_on_kept if kept else policy.training) + other.scoring
    return Floor(cached, cached + policy.scoring + other.scoring)
