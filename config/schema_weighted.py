"""Settings of a reward that is a weighted sum of other rewards."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

from common.errors import ConfigError, require
from config.files import group_file
from config.schema_rewards import OWN_KEYS, RewardConfig
from config.sections import dataclass, yaml_defaults

KEY = "reward.weighted.parts"
OWN = ("weight", "reward")
"""Keys of a part in addition to the settings of its reward."""


@dataclasses.dataclass(frozen=True)
class Part:
    """One reward of the sum, and the factor by which its scores are multiplied."""

    weight: float
    reward: RewardConfig


@dataclass
@yaml_defaults("reward/weighted.yaml:weighted")
class WeightedConfig:
    """``parts`` maps a name to the weight, the file of config/reward, and settings of that reward's
    section."""

    parts: dict[str, Any]
    normalize: Literal["none", "group"]

    def __post_init__(self) -> None:
        example = "give rewards with weights: {verifier: {weight: 1}, function: {weight: 0.2, path: m.f}}"
        require(bool(self.parts), KEY, self.parts, example)
        for name, settings in self.parts.items():
            sound = isinstance(name, str) and re.fullmatch(r"[A-Za-z0-9_]+", name) is not None
            require(sound, KEY, name, "a name is of letters, digits and underscores")
            require(isinstance(settings, dict), f"{KEY}.{name}", settings, example)
        self.typed()

    @property
    def needs_reference(self) -> bool:
        """Whether any part compares with the prompt's reference answer."""
        return any(part.reward.needs_reference for part in self.typed().values())

    def models_alone(self) -> WeightedConfig | None:
        """Return the parts that load a model in the run's own processes; None if there are none."""
        parts = {
            name: self.parts[name]
            for name, part in self.typed().items()
            if part.reward.models_alone() is not None
        }
        return WeightedConfig(parts=parts, normalize=self.normalize) if parts else None

    def typed(self) -> dict[str, Part]:
        """Return each part by its name, with its reward's settings typed. Raises ConfigError."""
        return {name: self._part(name, dict(settings)) for name, settings in self.parts.items()}

    @contextmanager
    def of_part(self, name: str) -> Iterator[None]:
        """Re-raise a ConfigError of the block with the setting's name as it is written here, below
        ``parts``."""
        try:
            yield
        except ConfigError as error:
            known = error.key.startswith("reward.")
            key = error.key.rpartition(".")[2]
            remedy = error.remedy if known else f"{error.key}: {error.remedy}"
            raise ConfigError(f"{KEY}.{name}.{key}", error.value, remedy) from error

    def _part(self, name: str, settings: dict[str, Any]) -> Part:
        weight, kind = settings.pop("weight", None), settings.pop("reward", name)
        number = isinstance(weight, int | float) and not isinstance(weight, bool)
        require(
            number and math.isfinite(weight) and weight != 0,
            f"{KEY}.{name}.weight",
            weight,
            "is what its scores are multiplied with: a number that is not 0",
        )
        key = f"{KEY}.{name}.reward"
        require(kind != "weighted", key, kind, "is this reward itself: name its parts here")
        tree = group_file("reward", key, str(kind))
        section = next(tree_key for tree_key in tree if tree_key not in OWN_KEYS)
        with self.of_part(name):
            return Part(float(weight), RewardConfig.from_tree(tree | {section: tree[section] | settings}))
