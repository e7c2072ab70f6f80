"""GRPO trainer, which trains every completion with the advantage within its group. By default the loss is a
mean over the global batch's completion tokens (DAPO, C.1.4)."""

from __future__ import annotations

import inspect
from dataclasses import replace

import torch
from torch import Tensor

from common.errors import require
from config.schema import Config
from data.types import Example, Microbatch
from data.views import ADVANTAGES, View, centred_advantages, group_advantages, normalised
from models.distributed import gather_values, reshard
from trainers.basic import BasicTrainer
from trainers.losses import shapes
from trainers.losses.base import LossResult, TokenScores
from trainers.losses.grpo import grpo
from trainers.scorer import TokenScorer

EQUAL_ENTROPIES = 1e-3
"""Nats. Entropies that differ by less count as one: the first tokens of a group's completions have the same,
but for the rounding of their microbatches."""


class GRPOTrainer(BasicTrainer[Tensor | None]):
    view = staticmethod(group_advantages)
    feedback = ("pair", "random", "min", "group")
    single_answers = False
    beta_scales_rewards = False
    loss_keys = ("advantage",)
    corrections = ("tokens",)

    @classmethod
    def view_of(cls, config: Config) -> View:
        """Return the view that ``loss.advantage`` names, or the class's own where it names none."""
        advantage = config.loss.get("advantage")
        return cls.view if advantage is None else ADVANTAGES[advantage]

    @classmethod
    def check_settings(cls, config: Config) -> None:
        check_shape(config)

    def loss_denominator(self, batch: list[Example]) -> int:
        if self.config.loss.get("normalization", "token") != "token":
            return len(batch)  # every sequence counts as one (eq. 1's 1/|y|, Dr. GRPO)
        return sum(len(row.counted) for example in batch for row in example.rows)

    def arrange(self, batch: list[Example]) -> list[Example]:
        """Return the batch; with ``advantage=batch`` its advantages are normalised over it before it is
        split."""
        return normalised(batch) if self.config.loss.get("advantage") == "batch" else batch

    def has_signal(self, batch: list[Example]) -> bool:
        """Return whether any advantage is not 0."""
        return any(example.label for example in self.arrange(batch))

    @torch.no_grad()
    def prepare(self, batch: list[tuple[int, Microbatch]], scorer: TokenScorer) -> list[Tensor | None]:
        """Return for each microbatch None, or with ``loss.entropy_share`` below 1 the tokens with the highest
        entropies, [R, T] bool, which cost one more forward of the batch, without gradient."""
        if self.config.loss.get("entropy_share", 1.0) == 1:
            return [None] * len(batch)
        return self.most_uncertain(batch)

    def most_uncertain(self, batch: list[tuple[int, Microbatch]]) -> list[Tensor | None]:
        """Return for each microbatch the tokens whose distributions have the highest entropies:
        ``loss.entropy_share`` of the global batch's completion tokens, rounded up, with all whose entropy
        equals the least of them but for rounding."""
        share, masked_entropies = self.config.loss["entropy_share"], []
        for _, micro in batch:
            entropies = self.policy(micro.sequences, entropy=True)
            reshard(self.policy)
            masked_entropies.append(torch.where(micro.sequences.mask, entropies, -torch.inf))
        highest = gather_values(
            torch.cat([part.flatten() for part in masked_entropies]), fill=-torch.inf
        ).sort(descending=True)
        last = (highest.values.isfinite().sum() * share).ceil().long().clamp(min=1) - 1
        least = highest.values.gather(0, last.reshape(1))[0]
        return [part >= least - EQUAL_ENTROPIES for part in masked_entropies]

    def compute_loss(self, micro: Microbatch, scores: TokenScores, prepared: Tensor | None) -> LossResult:
        if prepared is not None:
            kept = prepared.float()
            scores = replace(scores, weights=kept if scores.weights is None else scores.weights * kept)
        return self.loss(scores, micro.labels, **self.numbers(micro))


class CentredGRPOTrainer(GRPOTrainer):
    """Trainer of Dr. GRPO (Liu et al. 2025, arXiv 2503.20783), which does not divide advantages by their std:
    dividing would weigh prompts whose answers differ little as much as any other."""

    view = staticmethod(centred_advantages)


def check_shape(config: Config) -> None:
    """Raise ConfigError for a setting that this shape does not read and that is not at its default.

    ``epsilon`` may have any value: it has no default, and a sweep over shapes sets one for all.
    """
    shape = config.loss.get("shape")
    if shape not in tuple(shapes.SHAPES):
        return  # the loss has no shapes, or refuses this shape itself
    defaults = inspect.signature(grpo).parameters
    for key in sorted(frozenset[str]().union(*shapes.READS.values()) & config.loss.keys()):
        default = defaults[key].default
        if key in shapes.reads(shape) or default is inspect.Parameter.empty:
            continue
        readers = ", ".join(name for name, read in shapes.READS.items() if key in read)
        require(
            config.loss[key] == default,
            f"loss.{key}",
            config.loss[key],
            f"loss.shape={shape} does not read it, {readers} would; leave it at "
            f"{'null' if default is None else default}",
        )
