"""Settings of a trainer as its yaml in config/trainer gives them. No other part of the code knows trainers by
name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from typing import Any, Literal

from common.errors import require
from config.typed import Auto, PositiveShare, Share, Text, dataclass, typed, yaml_defaults

RESERVED_LOSS_KEYS = ("name", "_target_", "reference", "kl_anchor", "entropy_share")
"""Keys of ``loss`` that are no numbers for the loss function or its trainer."""


@dataclass
class LossKeys:
    """Keys of ``loss`` that its trainer reads, or that every loss with a reference may have."""

    kl_anchor: Literal["reference", "initial"] = "reference"
    entropy_share: PositiveShare = 1.0
    advantage: Auto[Literal["group", "group_mean", "rloo", "batch", "tokens"]] = None
    gamma: Share = 1.0
    lam: Share = 1.0
    rewards: Literal["labels", "scores"] = "labels"


@dataclass
@yaml_defaults("trainer/paired.yaml")
class TrainerConfig:
    """The class that trains, and the settings that it accepts."""

    online: bool
    feedback: list[Text]
    labelled_examples: bool
    logprob_range: bool
    beta_scales_rewards: bool
    loss_keys: list[Text]
    corrections: list[Text]
    name: Text = field()  # which trainer it is never comes from the file that gives the other defaults
    _target_: Text = field()
    single_answers: bool = True  # of a trainer that does not say, nothing is refused


def loss_numbers(loss: dict[str, Any], trainer_keys: Sequence[str]) -> dict[str, Any]:
    """Return the settings that the loss function itself takes: those of ``loss`` except the reserved keys and
    the keys that its trainer reads."""
    return {key: value for key, value in loss.items() if key not in (*RESERVED_LOSS_KEYS, *trainer_keys)}


def check_trainer_keys(loss: dict[str, Any], trainer: TrainerConfig) -> None:
    """Raise ConfigError if ``loss`` lacks a setting that its trainer reads, or has one that it cannot use."""
    for key in trainer.loss_keys:
        require(key in loss, f"loss.{key}", "???", f"loss={loss['name']} needs it")
    read = {"kl_anchor", "entropy_share", *trainer.loss_keys} & LossKeys.__annotations__.keys()
    typed({key: loss[key] for key in read if key in loss}, LossKeys, "loss.")
    if "control_tokens" in trainer.loss_keys:
        check_two_texts("loss.control_tokens", loss["control_tokens"])
    advantages = (key for key in ("advantage", "kl_in") if loss.get(key) in ("tokens", "reward"))
    if loss.get("shape") == "gmpo" and (clash := next(advantages, None)):
        one = "gives every token an advantage of its own, and loss.shape=gmpo has one a sequence"
        require(False, f"loss.{clash}", loss[clash], one)


def check_two_texts(key: str, texts: Any) -> None:
    """Raise ConfigError unless ``texts`` has two different texts, one for chosen and one for rejected
    completions."""
    named = isinstance(texts, dict) and set(texts) == {"chosen", "rejected"}
    require(
        named and all(isinstance(text, str) and text for text in texts.values()),
        key,
        texts,
        "give two texts, as in {chosen: <|good|>, rejected: <|bad|>}",
    )
    require(texts["chosen"] != texts["rejected"], key, texts, "must be two different texts")
