"""The study's plan, read, checked, and turned into runs (``launch.grid.Run``).

Tuning (``study.tuning``) has the same runs in each of the main cells. Every other cell inherits the tuned
settings of the main cell that it is ``like``.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from common.errors import ConfigError, require
from config.files import Loader
from launch.grid import Run, Settings

TASKS = {name: Path(__file__).parent / name / "plan.yaml" for name in ("adder", "instruct")}
"""The plans that come with the project, one for each embedded task."""
PLAN, CHOSEN = TASKS["adder"], "chosen.yaml"
"""The default plan, and the name of the file beside a plan that has the result of its tuning."""
FULL, QUICK = "full", "quick"
MAIN = "main"


@dataclass(frozen=True)
class Experiment:
    """A question and its cells (name -> settings beyond those of the main cell that it is like)."""

    name: str
    modes: tuple[str, ...]
    cells: dict[str, Settings]
    like: dict[str, str]


@dataclass(frozen=True)
class Plan:
    """A study's plan, read."""

    title: str
    about: str
    """The data and the model, for the report's reader."""
    measure: str
    """The metric in words."""
    base: Settings
    main: dict[str, Settings]
    """The main cells, ``dpo-offline`` …, with all their settings but the tuned ones."""
    losses: dict[str, str]
    """Main cell -> its loss."""
    experiments: tuple[Experiment, ...]
    tuning_seeds: tuple[int, ...]
    metric: str
    lrs: tuple[float, ...]
    then: dict[str, tuple[str, float]]
    """Main cell -> the setting that is tuned at the best learning rate, and its value until then."""
    then_name: str
    factors: tuple[float, ...]
    """Multiples of that value that are tried, beside 1."""
    tuning_settings: Settings
    """Settings of tuning's runs beyond those of their cell."""
    extend: int
    """How often a grid is extended if its best value is at its edge."""
    seeds: dict[str, dict[str, int]]
    quick: tuple[str, ...]
    """The main cells of ``quick``."""
    seconds: dict[str, float]
    """Approximate seconds of one core that an ``offline`` and an ``online`` run take."""

    # -- runs --------------------------------------------------------------------------------------

    def tuned(self, cell: str) -> tuple[str, str]:
        """The two settings of a main cell that tuning chooses."""
        return "lr", self.then[cell][0]

    def tuning_run(self, cell: str, lr: float, value: float, seed: int) -> Run:
        """Return a run of tuning. ``value``: that of the second tuned setting."""
        name = f"tune-{cell}-lr{lr:g}-{self.then_name}{value:g}"
        tried = self.tuning_settings | {"data.eval_split": "validation", "lr": lr, self.then[cell][0]: value}
        return Run("study", name, seed, self.settings(cell) | tried, None)

    def runs(
        self, mode: str, chosen: Mapping[str, Settings], seeds: Sequence[int] | None = None
    ) -> list[Run]:
        """Return the runs of ``full`` or ``quick`` with the settings that tuning chose (``cell -> {setting:
        value}``).

        The first three seeds of everything come first, then the rest, so that early results cover every
        question. ``seeds``: used instead of 1, 2, …; all of them are run.
        """
        found: list[tuple[int, int, Run]] = []
        for order, (name, cells) in enumerate(self.cells(mode).items()):
            count = self.seeds[mode]["main" if name == MAIN else "other"]
            for position, seed in enumerate(list(seeds) if seeds else range(1, count + 1)):
                for cell in cells:
                    settings = self.settings(cell, chosen[self.parent(cell)])
                    found.append((max(0, position - 2), order, Run("study", cell, seed, settings, None)))
        return [run for _, _, run in sorted(found, key=lambda item: item[:2])]

    def cells(self, mode: str) -> dict[str, list[str]]:
        """Experiment -> its cells, the main ones first."""
        main = {MAIN: list(self.quick if mode == QUICK else self.main)}
        return main | {e.name: list(e.cells) for e in self.experiments if mode in e.modes}

    def cost(self, run: Run) -> float:
        """Return the approximate seconds of one core that the run takes."""
        return self.seconds["online" if run.settings.get("online") else "offline"]

    def all_runs(self, mode: str) -> list[Run]:
        """Return runs that equal those of the mode in number and cost, as if every grid's first values were
        best. ``full`` includes the runs of tuning, without extended grids."""
        first = {cell: {"lr": self.lrs[0], self.then[cell][0]: self.then[cell][1]} for cell in self.main}
        tried = [
            self.tuning_run(cell, lr, self.then[cell][1] * factor, seed)
            for cell in self.main
            for lr, factor in [*((lr, 1.0) for lr in self.lrs), *((self.lrs[0], f) for f in self.factors)]
            for seed in self.tuning_seeds
        ]
        return (tried if mode == FULL else []) + self.runs(mode, first)

    def parent(self, cell: str) -> str:
        """The main cell whose tuned settings ``cell`` has."""
        return cell if cell in self.main else next(e.like[cell] for e in self.experiments if cell in e.cells)

    def settings(self, cell: str, chosen: Settings | None = None) -> Settings:
        """All settings of a cell but the seed. ``chosen``: the tuned ones of the main cell that it is like; a
        setting that the cell itself changes wins."""
        own: Settings = (
            {} if cell in self.main else next(e.cells[cell] for e in self.experiments if cell in e.cells)
        )
        tuned = {key: value for key, value in (chosen or {}).items() if key not in own}
        return self.base | self.main[self.parent(cell)] | own | tuned


def read_plan(path: Path = PLAN) -> Plan:
    """Return the plan in a file. Raises ConfigError for a part that is missing, unknown or of the wrong type,
    and for an experiment's cell that is like none of the main ones or is named twice."""
    raw, tuning = _read(path)
    main: dict[str, Settings] = {}
    losses: dict[str, str] = {}
    for loss, variant in itertools.product(raw["losses"], raw["variants"]):
        settings: Settings = dict(raw["losses"][loss]) | dict(raw["variants"][variant])
        if settings.get("online"):
            settings["rounds.examples"] = raw["losses"][loss]["n_examples"]
        main[f"{loss}-{variant}"] = settings | raw["exceptions"].get(f"{loss}-{variant}", {})
        losses[f"{loss}-{variant}"] = loss
    experiments = [_experiment(name, part, main) for name, part in raw["experiments"].items()]
    names = [*main, *(cell for e in experiments for cell in e.cells)]
    for name in names:
        require(names.count(name) == 1, "experiments", name, "names two cells")
    return Plan(
        raw["title"],
        raw["about"],
        raw["measure"],
        raw["base"],
        main,
        losses,
        tuple(experiments),
        tuple(tuning["seeds"]),
        tuning["metric"],
        tuple(number("tuning: lr", lr) for lr in tuning["lr"]),
        {cell: _then(tuning["then"]["settings"], loss, main[cell]) for cell, loss in losses.items()},
        tuning["then"]["name"],
        tuple(number("tuning.then: factors", factor) for factor in tuning["then"]["factors"]),
        tuning["settings"],
        tuning["extend"],
        raw["seeds"],
        tuple(f"{loss}-{variant}" for loss in raw["losses"] for variant in raw["quick"]),
        raw["seconds"],
    )


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (a plan's file with all of its parts, its tuning part with all of its parts). Raises
    ConfigError."""
    raw = read_yaml("--plan", path, "is not a file")
    require(isinstance(raw, dict), f"{path}", raw, "must be a mapping: see study/adder/plan.yaml")
    raw = {
        "title": path.parent.name,
        "about": "",
        "measure": "sampled accuracy",
        "quick": list(raw["variants"]) if isinstance(raw.get("variants"), dict) else [],
        "seconds": {"offline": 20, "online": 50},
    } | raw
    parts(
        f"{path}",
        raw,
        {
            "title": str,
            "about": str,
            "measure": str,
            "base": dict,
            "losses": dict,
            "variants": dict,
            "exceptions": dict,
            "tuning": dict,
            "quick": list,
            "seconds": dict,
            "seeds": dict,
            "experiments": dict,
        },
    )
    tuning = {"settings": {}} | raw["tuning"]
    kinds = {"settings": dict, "seeds": list, "metric": str, "lr": list, "then": dict, "extend": int}
    parts("tuning", tuning, kinds)
    parts("tuning.then", tuning["then"], {"name": str, "settings": dict, "factors": list})
    parts("seeds", raw["seeds"], {FULL: dict, QUICK: dict})
    for mode in (FULL, QUICK):
        parts(f"seeds.{mode}", raw["seeds"][mode], {MAIN: int, "other": int})
    parts("seconds", raw["seconds"], dict.fromkeys(("offline", "online"), int))
    for variant in raw["quick"]:
        require(variant in raw["variants"], "quick", variant, f"is none of {', '.join(raw['variants'])}")
    for key in ("losses", "variants"):
        parts(key, raw[key], dict.fromkeys(raw[key], dict))
    return raw, tuning


def _then(settings: Any, loss: str, own: Settings) -> tuple[str, float]:
    """Return the second tuned setting of a cell and its value before tuning: the cell's own if it has one."""
    parts("tuning.then.settings", settings, {**dict.fromkeys(settings, dict), loss: dict})
    require(len(settings[loss]) == 1, f"tuning.then.settings: {loss}", settings[loss], "must be one setting")
    ((key, value),) = settings[loss].items()
    return key, number(f"tuning.then.settings: {loss}.{key}", own.get(key, value))


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


def read_chosen(path: Path, plan: Plan, cells: Collection[str] | None = None) -> dict[str, Settings]:
    """Return the settings that tuning chose for ``cells`` (None: all main ones), from its file. Raises
    ConfigError if tuning was not run, or not for all of them."""
    wanted = plan.main if cells is None else cells
    raw = read_yaml("chosen", path, "is not there: run `python -m study full`, which tunes first")
    parts(f"{path}", raw, {"cells": dict})
    parts(f"{path}: cells", raw["cells"], dict.fromkeys(wanted, dict))
    for cell in wanted:
        parts(f"{path}: cells.{cell}", raw["cells"][cell], dict.fromkeys(plan.tuned(cell), object))
    return {
        cell: {
            key: number(f"{path}: cells.{cell}: {key}", raw["cells"][cell][key]) for key in plan.tuned(cell)
        }
        for cell in wanted
    }


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


def parts(key: str, found: Any, wanted: Mapping[str, type]) -> None:
    """Raise ConfigError unless ``found`` is a mapping with exactly the parts of ``wanted``, each of its
    type."""
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
