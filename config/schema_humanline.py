"""Settings of humanline sampling (Definition 4.2)."""

from __future__ import annotations

from dataclasses import dataclass, fields

from common.errors import require
from config.defaults import yaml_defaults


@dataclass
@yaml_defaults("config.yaml:humanline_sampling")
class BetaConfig:
    """The constants of Definition 4.2. The defaults are those of Theorem 4.3 for the paper's clipping range,
    e^-1.5 to e^1.5, at k = 100 and a bound of 10: the thresholds are spread around the ends of that range."""

    M_P: float
    M_R: float
    gamma_P: float
    beta_P: float
    gamma_R: float
    beta_R: float

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            require(value > 0, f"humanline_sampling.{item.name}", value, "must be above 0")
