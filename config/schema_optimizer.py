"""Settings specific to optimizers other than AdamW."""

from __future__ import annotations

import math
from dataclasses import dataclass

from common.errors import one_of, require
from config.defaults import yaml_defaults

OPTIMIZERS = ("AdamW", "Muon", "AdamW8bit")


@dataclass
@yaml_defaults("config.yaml:muon")
class MuonConfig:
    lr: float | None
    momentum: float
    adjust_lr: str

    def __post_init__(self) -> None:
        require(
            self.lr is None or 0 < self.lr < math.inf,
            "muon.lr",
            self.lr,
            "must be above 0, and finite; null: lr",
        )
        require(0 <= self.momentum < 1, "muon.momentum", self.momentum, "must lie in [0, 1)")
        one_of("muon.adjust_lr", self.adjust_lr, ("match_rms_adamw", "original"))
