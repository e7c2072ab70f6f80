"""The settings of humanline sampling, and those settings of a loss that its trainer reads rather than its function."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from common.errors import require

TRAINER_KEYS = {"gamma": "ppo", "lam": "ppo", "control_tokens": "csft"}
"""loss.<key> -> the trainer that reads it"""


@dataclass
class BetaConfig:
    """The constants of Definition 4.2. By default those of Theorem 4.3 for the paper's clipping range, e^-1.5 to e^1.5, at k = 100
    and a bound of 10: thresholds that are spread around the ends of that range."""

    M_P: float = 10.0
    M_R: float = 10.0
    gamma_P: float = 2.231
    beta_P: float = 97.769
    gamma_R: float = 2.231
    beta_R: float = 97.769

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            require(value > 0, f"humanline_sampling.{item.name}", value, "must be above 0")


def check_trainer_keys(loss: dict[str, Any], trainer: str) -> None:
    """Raise ConfigError for a setting of another trainer's, and for a missing or impossible one of this trainer's."""
    for key, owner in TRAINER_KEYS.items():
        require(
            trainer == owner or key not in loss,
            f"loss.{key}",
            loss.get(key),
            f"loss={loss['name']} does not take it",
        )
        require(trainer != owner or key in loss, f"loss.{key}", "???", f"loss={loss['name']} needs it")
    for key in ("gamma", "lam"):
        value = loss.get(key, 1.0)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        require(number and 0 <= value <= 1, f"loss.{key}", value, "must be a number in [0, 1]")
    if trainer == "csft":
        tokens = loss["control_tokens"]
        named = isinstance(tokens, dict) and set(tokens) == {"chosen", "rejected"}
        require(
            named and all(isinstance(text, str) and text for text in tokens.values()),
            "loss.control_tokens",
            tokens,
            "give two texts, as in {chosen: <|good|>, rejected: <|bad|>}",
        )
        require(
            tokens["chosen"] != tokens["rejected"],
            "loss.control_tokens",
            tokens,
            "must be two different texts",
        )
