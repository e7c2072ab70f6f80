"""Settings of corrections for samples that another policy drew."""

from __future__ import annotations

from dataclasses import dataclass

from common.errors import one_of, require
from config.defaults import yaml_defaults


@dataclass
@yaml_defaults("correction/none.yaml")
class CorrectionConfig:
    """The yaml files in config/correction say what each key means."""

    name: str
    _target_: str | None
    weighs: str
    reads_behavior: bool
    reads_collision: bool
    low: float
    high: float
    delta: float
    mismatch: str

    def __post_init__(self) -> None:
        one_of("correction.weighs", self.weighs, ("tokens", "examples"))
        one_of("correction.mismatch", self.mismatch, ("refuse", "allow"))
        require(self.low >= 0, "correction.low", self.low, "is a bound of a ratio: must be 0 or more")
        require(
            self.high > self.low, "correction.high", self.high, f"must be above correction.low={self.low}"
        )
