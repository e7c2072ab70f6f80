"""Build the loss, the trainer and the data source that the settings name, and refuse bad settings before
weights are loaded."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch

from common.errors import ConfigError, require
from common.imports import import_function
from config.schema import Config
from config.schema_trainer import loss_numbers
from data.balance import share_tokens
from data.batches import Segment
from data.examples import longest
from trainers.losses.base import LossResult, TokenScores
from trainers.settings import check_numbers

if TYPE_CHECKING:
    from trainers.basic import BasicTrainer

Loss = Callable[..., LossResult]


def make_loss(config: Config) -> Loss:
    """Return the loss function with its numbers filled in.

    Raises ConfigError for a number that the loss does not take, lacks, or cannot use."""
    function = import_function("loss._target_", config.loss["_target_"])
    check_numbers(config, inspect.signature(function))
    loss = partial(function, **loss_numbers(config.loss, config.accepts.loss_keys))
    _try(loss, config)
    return loss


def _try(loss: Loss, config: Config) -> None:
    """Call the loss once with one token per row, so that a number it refuses raises ConfigError now.

    A loss that needs inputs other than the ones known here is not tried."""
    zero, one = torch.zeros(1, 1), torch.ones(1)
    scores = TokenScores(zero, zero, zero, torch.ones(1, 1, dtype=torch.bool))
    inputs = {
        "chosen": scores,
        "rejected": scores,
        "scores": scores,
        "desirable": one > 0,
        "kl": zero.sum(),
        "advantages": one,
    }
    takes = inspect.signature(loss).parameters.values()
    needed = [
        p.name
        for p in takes
        if p.kind is not inspect.Parameter.KEYWORD_ONLY and p.default is inspect.Parameter.empty
    ]
    if set(needed) <= set(inputs):
        try:
            loss(*(inputs[name] for name in needed), **dict.fromkeys(config.data.numbers or (), one))
        except ValueError as error:
            for key, value in config.loss.items():
                if str(error).startswith(start := f"{key}={value}: "):
                    raise ConfigError(f"loss.{key}", value, str(error).removeprefix(start)) from error
            raise ConfigError("loss", config.loss["name"], str(error)) from error


def trainer_class(config: Config) -> type[BasicTrainer]:
    """Return the trainer class of the settings. Raises ConfigError if it is none."""
    from trainers.basic import BasicTrainer  # transformers too, which ``make_loss`` does without

    cls = import_function("trainer._target_", config.trainer._target_)
    require(
        isinstance(cls, type) and issubclass(cls, BasicTrainer),
        "trainer._target_",
        config.trainer._target_,
        "is not a subclass of trainers.basic.BasicTrainer",
    )
    return cls


def check_budget(config: Config, plan: Segment, packed: bool) -> None:
    """Raise ConfigError if an example has more tokens than ``model.microbatch_tokens`` allows, padding
    included where its rows are not ``packed``.

    Online, where nothing is sampled yet, the check uses the longest example that may be sampled."""
    budget = config.model.microbatch_tokens
    if budget is None:
        return
    most = longest(plan.groups, packed)
    tokens = share_tokens([most], packed)
    where = f"the example of prompt {most.prompt_id}" if most.prompt_id else "the longest that may be sampled"
    require(
        tokens <= budget,
        "model.microbatch_tokens",
        budget,
        f"{where} has {tokens} tokens{'' if packed else ', its rows padded to the longest'}: allow as many, "
        "or lower model.max_length",
    )


class Offline:
    """Source of offline training: the given segments, of which a run has one."""

    def __init__(self, *segments: Segment) -> None:
        self.all = segments

    def segment(self, index: int) -> Segment | None:
        return self.all[index] if index < len(self.all) else None
