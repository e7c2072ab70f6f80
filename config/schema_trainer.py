"""The class that trains, what it says of the settings that it accepts, and the keys of ``loss`` that it
reads. No part of the code knows trainers by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import field
from functools import cache
from typing import Any, Literal

from common.errors import ConfigError
from common.imports import import_function, written_attributes
from config.sections import Auto, NotNegative, Share, Text, dataclass, typed

RESERVED_LOSS_KEYS = ("name", "_target_", "reference", "kl_anchor")
"""Keys of ``loss`` that are no numbers for the loss function or its trainer."""


@dataclass
class LossKeys:
    """Keys of ``loss`` that its trainer reads, or that every loss with a reference may have."""

    kl_anchor: Literal["reference", "initial"] = "reference"
    advantage: Auto[Literal["group", "group_mean", "rloo", "batch"]] = None
    advantage_epsilon: NotNegative = 0.0
    gamma: Share = 1.0
    lam: Share = 1.0
    rewards: Literal["labels", "scores"] = "labels"


@dataclass
class TrainerConfig:
    """The class that trains, a subclass of ``trainers.basic.BasicTrainer``; the loss's file names it."""

    _target_: Text = field()


@dataclasses.dataclass(frozen=True)
class Accepts:
    """What a trainer's class says of itself; ``BasicTrainer`` explains each attribute."""

    online: bool
    feedback: tuple[str, ...]
    labelled_examples: bool
    single_answers: bool
    logprob_range: bool
    beta_scales_rewards: bool
    loss_keys: tuple[str, ...]
    corrections: bool


@cache
def accepted_by(path: str) -> Accepts:
    """Return what the class ``path`` accepts. Its source is read; it is imported, and torch with it, only
    where the source does not say. Raises ConfigError for what is no trainer."""
    names = [item.name for item in dataclasses.fields(Accepts)]
    says = written_attributes(path)
    if not says.keys() >= {*names}:
        says = {name: getattr(import_function("trainer._target_", path), name, None) for name in names}
    message = "is not a subclass of trainers.basic.BasicTrainer"
    if None in says.values():
        raise ConfigError("trainer._target_", path, message)
    return Accepts(**{name: says[name] for name in names})


def loss_numbers(loss: dict[str, Any], trainer_keys: Sequence[str]) -> dict[str, Any]:
    """Return the settings that the loss function itself takes: those of ``loss`` except the reserved keys and
    the keys that its trainer reads."""
    return {key: value for key, value in loss.items() if key not in (*RESERVED_LOSS_KEYS, *trainer_keys)}


def recorded_numbers(config: dict[str, Any]) -> dict[str, Any]:
    """Return the loss's numbers in a run's config.yaml."""
    trainer = str(config.get("trainer", {}).get("_target_", ""))
    return loss_numbers(config.get("loss", {}), written_attributes(trainer).get("loss_keys", ()))


def check_trainer_keys(loss: dict[str, Any], accepts: Accepts) -> None:
    """Raise ConfigError if ``loss`` lacks a setting that its trainer reads, or has one that it cannot use."""
    for key in accepts.loss_keys:
        if key not in loss:
            raise ConfigError(f"loss.{key}", "???", f"loss={loss['name']} needs it")
    read = {"kl_anchor", *accepts.loss_keys} & LossKeys.__annotations__.keys()
    typed({key: loss[key] for key in read if key in loss}, LossKeys, "loss.")
    if "control_tokens" in accepts.loss_keys:
        texts = loss["control_tokens"]
        named = isinstance(texts, dict) and set(texts) == {"chosen", "rejected"}
        written = named and all(isinstance(text, str) and text for text in texts.values())
        different = written and texts["chosen"] != texts["rejected"]
        two = "give two different texts, as in {chosen: <|good|>, rejected: <|bad|>}"
        if not different:
            raise ConfigError("loss.control_tokens", texts, two)
