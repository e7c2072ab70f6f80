"""Settings of the machine for which a dry run plans the memory, and the cards that are known."""

from __future__ import annotations

import math

from common.errors import ConfigError
from config.sections import Auto, Count, Text, dataclass, yaml_defaults

CARDS = {
    "A100-40GB": (39.4, 312e12),
    "A100-80GB": (79.2, 312e12),
    "H100": (79.1, 989e12),
    "H100-96GB": (94.5, 989e12),
    "H200": (139.8, 989e12),
    "B200": (178.3, 2250e12),
    "L4": (22.0, 121e12),
    "L40S": (44.4, 362e12),
    "RTX3090": (23.6, 71e12),
    "RTX4090": (23.5, 165e12),
}
"""Card -> (GiB of memory that a program can use on it, dense bfloat16 operations a second by the vendors'
datasheets)."""


@dataclass
@yaml_defaults("config.yaml:plan")
class PlanConfig:
    """config/config.yaml says what each key means."""

    card: Auto[Text]
    ranks: Auto[Count]

    def __post_init__(self) -> None:
        if self.card is not None:
            card_memory("plan.card", self.card)


def card_memory(key: str, card: str) -> float:
    """Return the memory in GiB of a card, given by its name or directly as a number. Raises ConfigError about
    ``key`` if it is neither."""
    if card in CARDS:
        return CARDS[card][0]
    try:
        size = float(card)
    except ValueError:
        size = math.nan
    if not 0 < size < math.inf:
        raise ConfigError(key, card, f"is none of {', '.join(CARDS)}, and no number of GiB")
    return size
