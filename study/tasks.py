"""The study's tasks, from their files: the settings of losses x the variants of training, and what tuning
chose for each of these cells. Two are embedded, the third is a real model's."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from common.errors import ConfigError, require
from config.files import Loader
from launch.grid import Settings

FOLDERS = {name: Path(__file__).parent / name for name in ("adder", "instruct", "constraints")}
TITLES = {"adder": "sums", "instruct": "stories", "constraints": "constraints"}


@dataclass(frozen=True)
class Task:
    """``cells``: ``dpo-offline`` … -> its settings but the tuned ones. ``tuned``: the same cells -> learning
    rate and anchor (β, or GRPO's ε) that tuning chose; none for a cell that is not in
    chosen.yaml."""

    cells: Mapping[str, Settings]
    tuned: Mapping[str, Settings]

    def settings(self, cell: str, tuned: bool) -> Settings:
        """Raises ConfigError for ``tuned`` where tuning chose nothing."""
        require(not tuned or cell in self.tuned, "tuned", cell, "has no tuned settings")
        return self.cells[cell] | (self.tuned[cell] if tuned else {})


def read_task(folder: Path) -> Task:
    """Raises ConfigError for a part that is missing, unknown or of the wrong type."""
    path = folder / "plan.yaml"
    raw = read_yaml("task", path, "is not a file")
    kinds = ("base", "losses", "variants", "exceptions")
    parts(f"{path}", raw, dict.fromkeys(kinds, dict))
    for key in kinds[1:]:
        parts(key, raw[key], dict.fromkeys(raw[key], dict))
    cells: dict[str, Settings] = {}
    for loss, variant in itertools.product(raw["losses"], raw["variants"]):
        settings: Settings = raw["losses"][loss] | raw["variants"][variant]
        if settings.get("online"):
            settings["rounds.examples"] = raw["losses"][loss]["n_examples"]
        own = raw["exceptions"].get(f"{loss}-{variant}", {})
        cells[f"{loss}-{variant}"] = raw["base"] | settings | own
    if not (folder / "chosen.yaml").is_file():
        return Task(cells, {})
    chosen = read_yaml("task", folder / "chosen.yaml", "is not a file")
    parts(f"{folder}/chosen.yaml", chosen, {"cells": dict})
    tuned = [cell for cell in cells if cell in chosen["cells"]]
    parts(f"{folder}/chosen.yaml", chosen["cells"], dict.fromkeys(tuned, dict))
    return Task(cells, chosen["cells"])


def read_yaml(key: str, path: Path, missing: str) -> Any:
    """Return the content of a YAML file. Raises ConfigError if it does not exist or cannot be read."""
    require(path.is_file(), key, path, missing)
    try:
        return yaml.load(path.read_text(encoding="utf-8"), Loader)
    except (yaml.YAMLError, ValueError, TypeError) as error:
        raise ConfigError(key, path, f"is no YAML: {' '.join(str(error).split())}") from error


def number(key: str, value: Any) -> float:
    """Return the value as a number, even if YAML reads it as a text (1e-4). Raises ConfigError."""
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise ConfigError(key, value, "must be a number") from error


def parts(key: str, mapping: Any, wanted: Mapping[str, type]) -> None:
    """Raise ConfigError unless ``mapping`` is a mapping with exactly the parts of ``wanted``, each of its
    type."""
    require(isinstance(mapping, dict), key, mapping, f"must be a mapping with {', '.join(wanted)}")
    for name, kind in wanted.items():
        require(
            name in mapping and isinstance(mapping[name], kind),
            f"{key}: {name}",
            mapping.get(name),
            f"must be there, as a {kind.__name__}",
        )
    for name in mapping:
        require(
            name in wanted,
            f"{key}: {name}",
            mapping[name],
            f"is nothing that is read here; there are {', '.join(wanted)}",
        )
