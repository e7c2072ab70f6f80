"""The settings of humanline sampling (Definition 4.2)."""

from __future__ import annotations

from dataclasses import dataclass, fields

from common.errors import require


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
