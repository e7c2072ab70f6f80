"""Every loss that config/loss offers, found by its yaml, behind one way to call it: rows in, total out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from torch import Tensor

from config.schema_trainer import accepted_by, loss_numbers
from trainers.humanline import Humanline
from trainers.losses.base import LossResult, TokenScores, token_sum

FILES = sorted((Path(__file__).parents[4] / "config" / "loss").glob("*.yaml"))
RANGE = Humanline(-1.5, 1.5)
PLAIN = Humanline()


@dataclass
class Loss:
    name: str
    trainer: str
    reference: bool
    numbers: dict[str, Any]
    function: Callable[..., LossResult]

    def __call__(self, scores: TokenScores, labels: Tensor) -> LossResult:
        """Paired losses read the first half of the rows as chosen, the second as rejected."""
        if self.trainer == "paired":
            return self.function(*scores.split(len(labels) // 2))
        if self.trainer == "reward":  # a row's sum stands for its reward
            rewards, half = token_sum(scores.policy, scores.mask), len(labels) // 2
            return self.function(rewards[:half], rewards[half:], scores.valid[:half] & scores.valid[half:])
        if self.trainer == "unpaired":
            return self.function(scores, labels > 0, torch.tensor(0.5))
        if self.trainer == "ppo":
            nothing = torch.zeros_like(scores.policy)
            return self.function(scores, nothing, labels, nothing)
        if self.trainer != "grpo":
            return self.function(scores)
        return self.function(scores, labels)


def load(path: Path, shape: str | None = None) -> Loss:
    """The loss of a yaml, with another ``loss.shape`` than its own."""
    cfg = OmegaConf.load(path)
    if shape is not None:
        cfg.loss.name, cfg.loss.shape = f"{cfg.loss.name}-{shape}", shape
    module, name = cfg.trainer._target_.split(".")[1:]
    trainer = "reward" if name == "RewardTrainer" else module
    numbers = OmegaConf.to_container(cfg.loss, resolve=False)
    taken = loss_numbers(numbers, accepted_by(cfg.trainer._target_).loss_keys)
    call = OmegaConf.create(taken | {"_target_": numbers["_target_"], "_partial_": True})
    return Loss(cfg.loss.name, trainer, cfg.loss.reference, taken, instantiate(call))


@dataclass
class Batch:
    """R rows in float64, the second half being the partners of the first."""

    policy: Tensor
    reference: Tensor
    mask: Tensor
    labels: Tensor

    def run(self, loss: Loss, humanline: Humanline = PLAIN) -> tuple[LossResult, Tensor]:
        """The result and its gradient with respect to the policy log-probabilities."""
        leaf = self.policy.clone().requires_grad_()
        result = loss(humanline.scores(leaf, self.reference, self.mask), self.labels)
        return result, torch.autograd.grad(result.total, leaf)[0]

    def take(self, pairs: slice) -> Batch:
        """Some of the pairs: the same slice of both halves."""
        half = len(self.labels) // 2
        fields = (self.policy, self.reference, self.mask, self.labels)
        return Batch(*(torch.cat([x[:half][pairs], x[half:][pairs]]) for x in fields))


def random_batch(pairs: int = 4, width: int = 6, spread: float = 3.0, seed: int = 0) -> Batch:
    """Rows of 1 to ``width`` tokens; log-ratios within ``spread`` nats; labels +1 for the first half, -1 for
    the second."""
    random = torch.Generator().manual_seed(seed)
    shape = (2 * pairs, width)
    policy = -3 * torch.rand(shape, generator=random, dtype=torch.float64) - 0.01
    reference = policy - spread * (2 * torch.rand(shape, generator=random, dtype=torch.float64) - 1)
    lengths = torch.randint(1, width + 1, (2 * pairs, 1), generator=random)
    labels = torch.cat([torch.ones(pairs), -torch.ones(pairs)]).double()
    return Batch(policy, reference, torch.arange(width) < lengths, labels)
