"""Plain training with a live second model: what the reference without weights must equal to the bit."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor

from config.schema import Config
from data.batches import Segment
from data.types import Example, Microbatch, Sequences
from models.policy import Policy
from tests.engine import Log, make_trainer, weights
from trainers.assembly import make_loss
from trainers.basic import BasicTrainer
from trainers.losses.base import TokenScores

LR = 0.003
INFINITE = (-math.inf, math.inf)
Bounds = tuple[float, float]


class SecondModel:
    """``policy``, trained in the order of the paper's listing (C.2.1). ``trainer`` only cuts the batches.
    ``bounds``: log epsilon_P and log epsilon_R, nats."""

    bounds_of_z0: Bounds | None = None
    """None: those of the other scores"""
    least_z0 = 0.0

    def __init__(self, trainer: BasicTrainer[Any], policy: Policy, bounds: Bounds = INFINITE) -> None:
        self.config, self.dealer, self.policy, self.bounds = trainer.config, trainer.dealer, policy, bounds
        self.loss = make_loss(trainer.config)
        self.params = [p for p in policy.parameters() if p.requires_grad]
        self.optimizer = self.make_optimizer()
        self.offsets: list[float] = []  # z0 of each step of KTO
        self.begin()

    def make_optimizer(self) -> torch.optim.Optimizer:
        eps = self.config.eps
        return torch.optim.AdamW(
            self.params, lr=LR, betas=(0.9, 0.999), eps=eps, weight_decay=0.01, fused=True
        )

    def begin(self) -> None:
        """Before a segment: its reference is the policy as it is now."""
        self.reference = copy.deepcopy(self.policy)

    def move(self, t: int, updated: bool) -> None:
        """Move the reference where that is due: asked before each update, and after it."""

    def scores(self, sequences: Sequences, bounds: Bounds) -> TokenScores:
        p = self.policy(sequences)
        with torch.no_grad():
            r = self.reference(sequences)
        return TokenScores(p, r, (p - r).clamp(*bounds), sequences.mask)

    @torch.no_grad()
    def z0(self, micros: list[Microbatch]) -> Tensor:
        bounds = self.bounds_of_z0 or self.bounds
        each = torch.cat([self.scores(m.mismatched, bounds).sequence_log_ratio().double() for m in micros])
        return (each.sum() / len(each)).float().clamp(min=self.least_z0)

    def step(self, t: int, batch: list[Example]) -> float:
        name, micros = self.config.loss["name"], self.dealer.microbatches(batch)
        tokens = sum(len(row.completion_ids) for example in batch for row in example.rows)
        units, total = tokens if name == "grpo" else len(batch), 0.0
        if name == "kto":
            self.offsets.append(float(z0 := self.z0(micros)))
        for m in micros:
            s = self.scores(m.sequences, self.bounds)
            if name == "dpo":
                result = self.loss(*s.split(len(m.examples)))
            elif name == "kto":
                result = self.loss(s, m.labels > 0, z0)
            else:
                result = self.loss(s, m.labels)
            (result.total * (1 / units)).backward()
            total += float(result.total.detach().double())
        torch.nn.utils.clip_grad_norm_(self.params, self.config.model.max_grad_norm)
        self.move(t, updated=False)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.move(t, updated=True)
        return total / units

    def train(self, *segments: Segment) -> list[float]:
        """The loss of every step."""
        losses = []
        for segment in segments:
            self.begin()
            losses += [self.step(t, segment.batch(t)) for t in range(segment.steps)]
        return losses


class Synced(SecondModel):
    """Its reference moves by ``alpha`` towards the policy in every k-th step, None: never; before the update,
    or ``late``."""

    def __init__(
        self,
        trainer: BasicTrainer[Any],
        policy: Policy,
        bounds: Bounds,
        k: int | None,
        alpha: float = 1.0,
        late: bool = False,
    ) -> None:
        super().__init__(trainer, policy, bounds)
        self.k, self.alpha, self.late = k, alpha, late

    def due(self, t: int) -> bool:
        return self.k is not None and (t + self.late) % self.k == 0

    def move(self, t: int, updated: bool) -> None:
        if updated is self.late and self.due(t):
            with torch.no_grad():
                for mine, theirs in zip(self.reference.parameters(), self.policy.parameters(), strict=True):
                    if theirs.requires_grad:  # others never move, and 4 bits are no numbers
                        mine.lerp_(theirs, self.alpha)


def assert_identical(
    trainer: BasicTrainer[Any], lines: list[dict[str, Any]], plain: SecondModel, *segments: Any
) -> None:
    """Losses of every step and the last weights are those of plain training on the segments, to the bit."""
    assert [line["loss"] for line in lines] == plain.train(*segments)
    final = weights(trainer)
    assert all(torch.equal(final[name], p.detach()) for name, p in plain.policy.named_parameters())


class Rounds:
    """Segments one after another, as a source of rounds gives them; and as one for a plain loop."""

    def __init__(self, *segments: Segment) -> None:
        self.segments = segments
        self.batches = [s.batch(i) for s in segments for i in range(s.steps)]
        self.steps = len(self.batches)

    def segment(self, index: int) -> Segment | None:
        return self.segments[index] if index < len(self.segments) else None

    def batch(self, step: int) -> list[Example]:
        return self.batches[step]


def train_rounds(
    config: Config, start: Policy, *segments: Segment
) -> tuple[BasicTrainer[Any], list[dict[str, Any]]]:
    """A trainer that began with a copy of ``start`` after these rounds, and the lines of its metrics."""
    trainer, log = make_trainer(config, copy.deepcopy(start)), Log()
    trainer.train(Rounds(*segments), log)
    return trainer, log.lines
