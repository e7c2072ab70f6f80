"""GRPO trainer, which trains every completion with the advantage within its group. By default the loss is a
mean over the global batch's completion tokens (DAPO, C.1.4)."""

from __future__ import annotations

import inspect

import torch
from torch import Tensor

from common.errors import one_of, require
from config.schema import Config
from data.types import Example, Microbatch
from data.views import ADVANTAGES, View, centred_advantages, group_advantages, normalised
from models.distributed import gather_values
from trainers.basic import BasicTrainer
from trainers.losses import shapes
from trainers.losses.base import LossResult, TokenScores
from trainers.losses.grpo import by_token, grpo
from trainers.scorer import TokenScorer


class GRPOTrainer(BasicTrainer[Tensor | None]):
    view = staticmethod(group_advantages)

    @classmethod
    def view_of(cls, config: Config) -> View:
        """Return the view that ``loss.advantage`` names, or the class's own where it names none."""
        advantage = config.loss.get("advantage")
        return cls.view if advantage is None else ADVANTAGES[advantage]

    @classmethod
    def check_settings(cls, config: Config) -> None:
        one_of("loss.advantage", config.loss.get("advantage"), (None, *ADVANTAGES))
        check_shape(config)
        if config.loss.get("advantage") == "tokens":
            check_token_advantages(config)

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
        if self.config.loss.get("advantage") == "tokens":
            given = [row.token_rewards for example in batch for row in example.rows]
            return any(rewards is not None and rewards.any() for rewards in given)
        return any(example.label for example in self.arrange(batch))

    @torch.no_grad()
    def prepare(self, batch: list[tuple[int, Microbatch]], scorer: TokenScorer) -> list[Tensor | None]:
        """Return None per microbatch, unless the shape masks by the global batch (M2PO): then [R, T] bool,
        the tokens that the second moment of the batch's log-ratios masks. That costs one more forward of the
        batch, without gradient."""
        shape = self.config.loss.get("shape")
        if shape is None or "masked" not in shapes.reads(shape):
            return [None] * len(batch)
        squares = [
            shapes.second_moments(
                scorer.score_without_gradient(step, micro.sequences), by_token(self.advantages(micro))
            )
            for step, micro in batch
        ]
        everywhere = gather_values(torch.cat([part.flatten() for part in squares]), fill=float("inf"))
        limit = shapes.moment_limit(everywhere, self.config.loss["moment_bound"])
        return [shapes.beyond_moment(part, limit) for part in squares]

    def compute_loss(self, micro: Microbatch, scores: TokenScores, prepared: Tensor | None) -> LossResult:
        if prepared is None:
            return self.loss(scores, self.advantages(micro))
        return self.loss(scores, self.advantages(micro), prepared)

    def advantages(self, micro: Microbatch) -> Tensor:
        """Return [R], the rows' advantages, or with ``advantage=tokens`` [R, T], the tokens' advantages."""
        if self.config.loss.get("advantage") != "tokens":
            return micro.labels
        given = micro.sequences.token_rewards
        # None where all rows only fill up the batch
        return torch.zeros_like(micro.sequences.mask, dtype=torch.float32) if given is None else given


class CentredGRPOTrainer(GRPOTrainer):
    """Trainer of Dr. GRPO (Liu et al. 2025, arXiv 2503.20783), which does not divide advantages by their std:
    dividing would weigh prompts whose answers differ little as much as any other."""

    view = staticmethod(centred_advantages)


def check_token_advantages(config: Config) -> None:
    """Raise ConfigError for a shape that cannot use one advantage per token."""
    require(
        config.loss.get("shape") != "gmpo",
        "loss.advantage",
        "tokens",
        "gives every token an advantage of its own, and loss.shape=gmpo has one a sequence",
    )


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
