"""Build the loss, the trainer and the data source that the settings name, and refuse bad settings before
weights are loaded."""

from __future__ import annotations

import inspect
import math
import re
from ast import literal_eval
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from common.errors import ConfigError
from common.imports import import_function
from config.files import FOLDER, section
from config.schema import Config
from config.schema_trainer import loss_numbers
from data.balance import share_tokens
from data.batches import Segment
from data.examples import longest
from trainers.losses.base import LossResult, TokenScores

if TYPE_CHECKING:
    from trainers.basic import BasicTrainer

Loss = Callable[..., LossResult]
TAKES: dict[str, tuple[type | tuple[type, ...], str]] = {
    "float": ((int, float), "must be a number"),
    "int": (int, "must be a whole number"),
    "bool": (bool, "must be true or false"),
    "str": (str, "must be a text"),
}
"""The annotation of a loss's keyword argument -> (what its setting may be, what to say of another)."""


def make_loss(config: Config) -> Loss:
    """Return the loss function with its numbers filled in.

    Raises ConfigError for a number that the loss does not take, lacks, or cannot use."""
    function = import_function("loss._target_", config.loss["_target_"])
    numbers = loss_numbers(config.loss, config.accepts.loss_keys)
    check_numbers(config, numbers, inspect.signature(function))
    loss = partial(function, **numbers)
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


def check_numbers(config: Config, numbers: dict[str, Any], signature: inspect.Signature) -> None:
    """Raise ConfigError for one of the ``numbers`` that the loss of this ``signature`` does not take, lacks,
    or cannot use."""
    name, from_data = f"loss={config.loss['name']}", config.data.numbers or ()
    takes = {n: p for n, p in signature.parameters.items() if p.kind is inspect.Parameter.KEYWORD_ONLY}
    file = f"loss/{config.loss['name']}.yaml"
    # it may lie in another folder
    defaults = section(f"{file}:loss") if (FOLDER / file).is_file() else numbers
    for key, value in numbers.items():
        others = ", ".join(takes) or "no numbers"
        if key not in takes:
            raise ConfigError(f"loss.{key}", value, f"{name} does not take it; it takes {others}")
        # beta elsewhere weighs a penalty, and 0 means no penalty
        scales = key in ("beta", "tau") and config.accepts.beta_scales_rewards
        endless = defaults.get(key) == math.inf
        annotation = takes[key].annotation
        written = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
        _check_number(f"loss.{key}", value, written, scales, endless)
    for column in from_data:
        if column not in takes or column in numbers:
            raise ConfigError(
                "data.numbers",
                config.data.numbers,
                f"{name} does not take {column}; one that does has it after * (docs/extend.md)",
            )
    for key, parameter in takes.items():
        there = key in numbers or key in from_data or parameter.default is not inspect.Parameter.empty
        where = f"{name} needs it; set it in config/loss/{config.loss['name']}.yaml"
        if not there:
            raise ConfigError(f"loss.{key}", "???", where)


def _check_number(key: str, value: object, annotation: str, scales: bool, endless: bool) -> None:
    """``scales``: whether the loss has no gradient at 0; ``endless``: whether its file has no bound."""
    kinds = re.sub(r"Literal\[.*\]", "", annotation).replace(" ", "").split("|")
    choices = [literal_eval(f"({literal},)") for literal in re.findall(r"Literal\[(.*?)\]", annotation)]
    if choices:
        allowed = (*((None,) if "None" in kinds else ()), *choices[0])
        if value not in allowed:
            raise ConfigError(key, value, f"use one of {', '.join(map(str, allowed))}")
    types, problem = next((TAKES[kind] for kind in kinds if kind in TAKES), (object, ""))
    if value is None and "None" in kinds:
        return
    if not (isinstance(value, types) and (types is bool or not isinstance(value, bool))):
        raise ConfigError(key, value, problem)
    if "float" in kinds:
        assert isinstance(value, int | float)
        if not (value >= 0):
            raise ConfigError(key, value, "must be 0 or more")
        if not endless and not math.isfinite(value):
            raise ConfigError(key, value, "must be finite")
        if not (value > 0) and scales:
            raise ConfigError(key, value, "must be above 0, or the loss has no gradient")


def trainer_class(config: Config) -> type[BasicTrainer]:
    """Return the trainer class of the settings. Raises ConfigError if it is none."""
    from trainers.basic import BasicTrainer  # transformers too, which ``make_loss`` does without

    cls = import_function("trainer._target_", config.trainer._target_)
    if not isinstance(cls, type) or not issubclass(cls, BasicTrainer):
        raise ConfigError(
            "trainer._target_", config.trainer._target_, "is not a subclass of trainers.basic.BasicTrainer"
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
    if tokens > budget:
        raise ConfigError(
            "model.microbatch_tokens",
            budget,
            f"{where} has {tokens} tokens{'' if packed else ', its rows padded to the longest'}: allow as "
            "many, or lower model.max_length",
        )


def check_correction(config: Config, segment: Segment) -> None:
    """Raise ConfigError for a correction or a ratio that reads mu if mu is known for no token of the plan."""
    if config.reads_behavior and not config.online and not segment.has_behavior:
        raise ConfigError(
            *config.behavior_setting,
            f"weighs tokens by the policy that wrote them, and no completion of data={config.data.name} has "
            "behavior_logprobs; sample.py writes them, with data.path=samples.jsonl to train on them",
        )


class Offline:
    """Source of offline training: the given segments, of which a run has one."""

    def __init__(self, *segments: Segment) -> None:
        self.all = segments

    def segment(self, index: int) -> Segment | None:
        return self.all[index] if index < len(self.all) else None
