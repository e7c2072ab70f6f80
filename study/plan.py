"""What the study runs: ``plan.yaml`` read, checked, and turned into runs (``launch.grid.Run``).

Tuning has the same runs in each of the twelve cells. Everything else inherits the tuned settings of the cell
that it is ``like``.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from common.errors import ConfigError, require
from launch.grid import Run, Settings

PLAN, CHOSEN = Path(__file__).parent / "plan.yaml", "chosen.yaml"
"""The plan, and what lies beside one once its tuning was run."""
FULL, QUICK = "full", "quick"
MAIN = "main"
TUNED = ("lr", "model.max_grad_norm")
DEFAULT_NORM = 1.0


@dataclass(frozen=True)
class Experiment:
    """A question and its cells (name -> settings beyond those of the cell that it is like)."""

    name: str
    modes: tuple[str, ...]
    cells: dict[str, Settings]
    like: dict[str, str]


@dataclass(frozen=True)
class Plan:
    """The study's plan, read."""

    base: Settings
    main: dict[str, Settings]
    """The twelve cells, ``dpo-offline`` …, with all their settings but the tuned ones."""
    experiments: tuple[Experiment, ...]
    tuning_seeds: tuple[int, ...]
    metric: str
    lrs: tuple[float, ...]
    norms: tuple[float, ...]
    """Tried beside ``DEFAULT_NORM``."""
    seeds: dict[str, dict[str, int]]

    # -- runs --------------------------------------------------------------------------------------

    def lr_runs(self) -> list[Run]:
        """Tuning, first half: every learning rate at the default norm, in every one of the twelve cells."""
        return [
            self._tuning(cell, lr, DEFAULT_NORM, seed)
            for seed, lr, cell in itertools.product(self.tuning_seeds, self.lrs, self.main)
        ]

    def norm_runs(self, lrs: Mapping[str, float]) -> list[Run]:
        """Tuning, second half: the other norms at each cell's best learning rate."""
        return [
            self._tuning(cell, lrs[cell], norm, seed)
            for seed, norm, cell in itertools.product(self.tuning_seeds, self.norms, self.main)
        ]

    def tuning_runs(self, cell: str, lr: float | None = None) -> list[Run]:
        """A cell's runs of either half: those of all learning rates, or with ``lr`` those of all norms at
        it."""
        tried = (
            [(one, DEFAULT_NORM) for one in self.lrs]
            if lr is None
            else [(lr, norm) for norm in sorted({DEFAULT_NORM, *self.norms})]
        )
        return [self._tuning(cell, one, norm, seed) for one, norm in tried for seed in self.tuning_seeds]

    def runs(
        self, mode: str, chosen: Mapping[str, Settings], seeds: Sequence[int] | None = None
    ) -> list[Run]:
        """The runs of ``full`` or ``quick`` with the settings that tuning chose (``cell -> {lr,
        model.max_grad_norm}``).

        A first three seeds of everything come first, then the rest, so that what is there early covers every
        question. ``seeds``: these instead of 1, 2, … (as many as there are)."""
        found: list[tuple[int, int, Run]] = []
        for order, (name, cells) in enumerate(self.cells(mode).items()):
            count = self.seeds[mode]["main" if name == MAIN else "other"]
            for position, seed in enumerate(list(seeds) if seeds else range(1, count + 1)):
                for cell in cells:
                    settings = self.settings(cell) | dict(chosen[self.parent(cell)])
                    found.append((max(0, position - 2), order, Run("study", cell, seed, settings, None)))
        return [run for _, _, run in sorted(found, key=lambda item: item[:2])]

    def cells(self, mode: str) -> dict[str, list[str]]:
        """Experiment -> its cells, the twelve first."""
        return {MAIN: list(self.main)} | {e.name: list(e.cells) for e in self.experiments if mode in e.modes}

    def parent(self, cell: str) -> str:
        """The one of the twelve whose tuned settings ``cell`` has."""
        return cell if cell in self.main else next(e.like[cell] for e in self.experiments if cell in e.cells)

    def settings(self, cell: str) -> Settings:
        """All settings of a cell but seed and what was tuned."""
        own: Settings = (
            {} if cell in self.main else next(e.cells[cell] for e in self.experiments if cell in e.cells)
        )
        return self.base | self.main[self.parent(cell)] | own

    def _tuning(self, cell: str, lr: float, norm: float, seed: int) -> Run:
        name = f"tune-{cell}-lr{lr:g}-norm{norm:g}"
        tried = {"data.eval_split": "validation", "lr": lr, "model.max_grad_norm": norm}
        return Run("study", name, seed, self.settings(cell) | tried, None)


def read_plan(path: Path = PLAN) -> Plan:
    """Raises ConfigError for what is not a plan: a part that is missing, unknown or of another kind, an
    experiment's cell that is like none of the twelve, or is named twice."""
    raw = read_yaml("--plan", path, "is not a file")
    parts(
        f"{path}",
        raw,
        {
            "base": dict,
            "losses": dict,
            "variants": dict,
            "exceptions": dict,
            "tuning": dict,
            "seeds": dict,
            "experiments": dict,
        },
    )
    parts("tuning", raw["tuning"], {"seeds": list, "metric": str, "lr": list, "max_grad_norm": list})
    parts("seeds", raw["seeds"], {FULL: dict, QUICK: dict})
    for mode in (FULL, QUICK):
        parts(f"seeds.{mode}", raw["seeds"][mode], {MAIN: int, "other": int})
    for key in ("losses", "variants"):
        parts(key, raw[key], dict.fromkeys(raw[key], dict))
    main: dict[str, Settings] = {}
    for loss, variant in itertools.product(raw["losses"], raw["variants"]):
        settings: Settings = dict(raw["losses"][loss]) | dict(raw["variants"][variant])
        if settings.get("online"):
            settings["rounds.examples"] = raw["losses"][loss]["n_examples"]
        main[f"{loss}-{variant}"] = settings | raw["exceptions"].get(f"{loss}-{variant}", {})
    experiments = [_experiment(name, part, main) for name, part in raw["experiments"].items()]
    names = [*main, *(cell for e in experiments for cell in e.cells)]
    for name in names:
        require(names.count(name) == 1, "experiments", name, "names two cells")
    tuning = raw["tuning"]
    return Plan(
        raw["base"],
        main,
        tuple(experiments),
        tuple(tuning["seeds"]),
        tuning["metric"],
        tuple(number("tuning: lr", lr) for lr in tuning["lr"]),
        tuple(number("tuning: max_grad_norm", norm) for norm in tuning["max_grad_norm"]),
        raw["seeds"],
    )


def _experiment(name: str, part: dict[str, Any], main: Mapping[str, Settings]) -> Experiment:
    cells, like = {}, {}
    parts(f"experiments.{name}", {"base": {}} | part, {"in": list, "base": dict, "cells": dict})
    parts(f"experiments.{name}.cells", part["cells"], dict.fromkeys(part["cells"], dict))
    for cell, settings in part["cells"].items():
        own = dict(part.get("base", {})) | dict(settings)
        like[cell] = own.pop("like", None)
        require(
            like[cell] in main, f"experiments.{name}.{cell}.like", like[cell], f"is none of {', '.join(main)}"
        )
        cells[cell] = own
    return Experiment(name, tuple(part["in"]), cells, like)


def best(values: Mapping[float, float]) -> float:
    """The tried value with the highest mean of the metric; of equals the smallest. Raises ValueError of
    nothing."""
    return min(values, key=lambda tried: (-values[tried], tried))


def read_chosen(path: Path, cells: Collection[str]) -> dict[str, Settings]:
    """What tuning chose for ``cells``, from its file. Raises ConfigError where it was not run, or not for all
    of them."""
    raw = read_yaml("chosen", path, "is not there: run `python -m study full`, which tunes first")
    parts(f"{path}", raw, {"cells": dict})
    parts(f"{path}: cells", raw["cells"], dict.fromkeys(cells, dict))
    for cell in cells:
        parts(f"{path}: cells.{cell}", raw["cells"][cell], dict.fromkeys(TUNED, object))
    return {
        cell: {key: number(f"{path}: cells.{cell}: {key}", raw["cells"][cell][key]) for key in TUNED}
        for cell in cells
    }


def read_yaml(key: str, path: Path, missing: str) -> Any:
    """What a YAML file holds. Raises ConfigError if it is not there or cannot be read."""
    require(path.is_file(), key, path, missing)
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(key, path, f"is no YAML: {' '.join(str(error).split())}") from error


def number(key: str, value: Any) -> float:
    """A number, also one that YAML reads as a text (1e-4). Raises ConfigError."""
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise ConfigError(key, value, "must be a number") from error


def parts(key: str, found: Any, wanted: Mapping[str, type]) -> None:
    """Raise ConfigError unless ``found`` is a mapping with just the parts of ``wanted``, each of its type."""
    require(isinstance(found, dict), key, found, f"must be a mapping with {', '.join(wanted)}")
    for name, kind in wanted.items():
        require(
            name in found and isinstance(found[name], kind),
            f"{key}: {name}",
            found.get(name),
            f"must be there, as a {kind.__name__}",
        )
    for name in found:
        require(
            name in wanted,
            f"{key}: {name}",
            found[name],
            f"is nothing that is read here; there are {', '.join(wanted)}",
        )
