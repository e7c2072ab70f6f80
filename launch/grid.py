"""A sweep file and its runs, with the settings that the runs share, the grid in which they differ, the seeds,
and the combinations to leave out.

A sweep file::

    base:                                # settings of every run
      experiment: dpo-offline-humanline
    cells:                               # named settings that belong together (optional)
      both: {sync_freq: 1}
      clip-only: {sync_freq: 1000000000}
    grid:                                # every combination of these (optional)
      loss: [dpo, kto]                   # a list
      sync_freq: {from: 1, to: 64, times: 4}                         # a range: 1, 4, 16, 64; or plus: … for equal distances
      log_epsilon_P, log_epsilon_R: [[-2.0, 1.5], [-1.5, 1.5]]       # tied keys: they change together
    seeds: [1, 2, 3]
    skip:                                # a combination is left out if it has all the values of one of these lines
      - {loss: sft, humanline: true}
    slurm: {gpus_per_node: 4}            # what a run needs of a cluster, over the site's defaults (launch/sites/example.yaml)
    hours: 2.5                           # what one run takes
    select: [lr]                         # grid keys to be chosen on validation, not compared (launch.results)
    tests:                               # decided by launch.results once all their runs have ended, with Holm over all of them
      - {name: clip, cells: [clip-only-dpo, both-dpo], metric: eval_accuracy_sampled, effect: 0.02}   # second minus first; what matters
      - {cells: [both-dpo, both-kto], metric: eval_accuracy_sampled, effect: 0.02, kind: same}        # are they within ±0.02?
      - {cells: [[clip-only-dpo, clip-only-kto], [both-dpo, both-kto]], metric: eval_accuracy_sampled, effect: 0.02}   # means over losses

The runs are ``cells x grid x seeds`` in that order; a run's name consists of the sweep's name, the run's
values and its seed.
"""  # noqa: E501

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from hydra.core.override_parser.types import Quote, QuotedString
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import Field
from yaml import YAMLError  # type: ignore[import-untyped]

from common.errors import ConfigError, require
from common.files import check_name
from common.secrets import IN_FILES, REMOVED, scrub
from config.files import FOLDER, parsed
from config.removed import refuse_removed, why_removed
from config.sections import dataclass as section
from config.sections import must, typed

Settings = dict[str, Any]
OWN_KEYS = ("seed", "exp_name", "resume", "overwrite", "dry_run", "idle_settings", "wandb.tags")
"""Settings that the sweep itself gives to every run."""
MOST_RUNS = 10_000
_TOO_MANY = f"above {MOST_RUNS:,}, the most that a sweep may have"
LONGEST_TAG = 64
"""Characters that wandb allows in a tag, and so also the longest name of a cell."""
DIFFERENT: Literal["different"] = "different"
SAME: Literal["same"] = "same"
_PLAIN = re.compile(r"[A-Za-z_/.][A-Za-z0-9_/.:\-]*")
_WORDS = ("true", "false", "null", "none", "inf", "nan", "yes", "no", "on", "off")


@dataclass(frozen=True)
class Run:
    """One run of a sweep. ``settings`` has everything but the settings in ``own``, such as the run's name and
    seed."""

    sweep: str
    cell: str
    """The sweep's name and the values of the grid, which runs that differ by their seed alone have in
    common."""
    seed: int
    settings: Settings
    hours: float | None
    """Expected hours, wall-clock; None if the sweep does not say."""

    @property
    def name(self) -> str:
        """``exp_name``."""
        return f"{self.cell}-s{self.seed}"

    def overrides(self) -> list[str]:
        """Return the arguments of ``python train.py``: one command line for the first start and every later
        one."""
        return [override(key, value) for key, value in self.all_settings.items()]

    @property
    def all_settings(self) -> Settings:
        """All settings that the run sets."""
        return self.settings | self.own

    @property
    def own(self) -> Settings:
        """The settings that the sweep gives to this run alone."""
        return {
            "seed": self.seed,
            "exp_name": self.name,
            "resume": True,
            "idle_settings": "note",
            "wandb.tags": [self.sweep, self.cell],
        }


TWO_CELLS = (
    "must be two cells, the second minus the first, as in [plain, humanline]; a list of cells in place of "
    "one stands for their mean, seed by seed"
)
A_METRIC = (
    "must be a number of a finished run: eval_accuracy_sampled, another eval_…, or FILE/NAME of an evaluation"
)


@section
class PlannedTest:
    """A test of the second of two ``cells`` minus the first, paired by seed.

    ``cells``: as ``Sweep.compared`` has them; a list of them stands for their mean, seed by seed.
    ``effect``: the smallest difference that matters, in the metric's unit. ``kind``: DIFFERENT asks whether
    the cells differ, SAME whether they are within ±``effect`` of each other.
    """

    name: str = ""
    cells: Annotated[
        list[str | list[str]],
        must(lambda sides: len(sides) == 2 and sides[0] != sides[1] and all(sides), TWO_CELLS),
    ] = field(default_factory=list)
    metric: Annotated[str, must(lambda of: "/" in of or of.startswith("eval_"), A_METRIC)] = ""
    effect: Annotated[
        float, Field(gt=0), "must be the smallest difference that matters, a number above 0"
    ] = 0
    kind: Literal["different", "same"] = DIFFERENT

    @property
    def sides(self) -> list[list[str]]:
        """The cells of the first and of the second side."""
        return [[side] if isinstance(side, str) else side for side in self.cells]

    @property
    def difference(self) -> str:
        """What is tested, in words."""
        return " − ".join(" & ".join(side) for side in reversed(self.sides))


@dataclass(frozen=True)
class Sweep:
    """A sweep file, read."""

    name: str
    base: Settings = field(default_factory=dict)
    cells: dict[str, Settings] = field(default_factory=dict)
    grid: tuple[tuple[Settings, ...], ...] = ()
    """One tuple of alternatives per axis; an alternative has one key, or several tied keys."""
    seeds: tuple[int, ...] = (1,)
    skip: tuple[Settings, ...] = ()
    hours: float | None = None
    select: tuple[str, ...] = ()
    slurm: Settings = field(default_factory=dict)
    tests: tuple[PlannedTest, ...] = ()

    def runs(self) -> list[Run]:
        """Return every run, in the order of the file.

        Raises ConfigError if two runs would have one name, a name cannot be a folder's, or nothing is left to
        run.
        """
        check_name("name", self.name)
        for name in self.cells:
            check_name("cells", name)
        runs = []
        count = math.prod([len(self.cells) or 1, len(self.seeds), *map(len, self.grid)])
        require(count <= MOST_RUNS, "grid", count, f"are the combinations of {self.name}, {_TOO_MANY}")
        for rule in self.skip:
            fits = any(matches(rule, self.base | point) for _, point in self._points())
            require(fits, "skip", rule, f"fits no run of sweep {self.name}: check its keys and values")
        for cell, point in self._points():
            settings = self.base | point
            if any(matches(rule, settings) for rule in self.skip):
                continue
            written = f"{IN_FILES.format('a sweep writes its commands')} (in its file \\${{oc.env:NAME}})"
            for key, value in settings.items():
                require(value == scrub(value, key, show=False), key, REMOVED, written)
            long = f"is longer than {LONGEST_TAG} characters; name it under cells:"
            require(len(cell) <= LONGEST_TAG, "cell", cell, long)
            runs += [Run(self.name, cell, seed, settings, self.hours) for seed in self.seeds]
        for name, count in Counter(run.name for run in runs).items():
            check_name("exp_name", name)
            twice = f"names two runs of sweep {self.name}; give the cells names (cells:)"
            require(count == 1, "exp_name", name, twice)
        require(bool(runs), "skip", list(self.skip), f"leaves nothing to run of sweep {self.name}")
        return runs

    @property
    def varied(self) -> set[str]:
        """The settings in which runs differ, without the seed."""
        return set().union(*self.cells.values(), *(point for axis in self.grid for point in axis))

    @property
    def axes(self) -> dict[str, tuple[str, ...]]:
        """The crossed axes in the order of the file: ``cells`` and each line of the grid -> its values, as
        they appear in the names of cells."""
        lines = {", ".join(axis[0]): tuple(map(labels, axis)) for axis in self.grid}
        return ({"cells": tuple(self.cells)} if self.cells else {}) | lines

    @property
    def compared(self) -> list[str]:
        """The cells that a table of results compares: without the sweep's name and what ``select``
        chooses."""
        runs = self.runs()
        names = (unselected(run.cell, {key: run.settings.get(key) for key in self.select}) for run in runs)
        return list(dict.fromkeys(name.removeprefix(f"{self.name}-") for name in names))

    def _points(self) -> Iterator[tuple[str, Settings]]:
        points = itertools.product(*([self.cells.values()] if self.cells else []), *self.grid)
        for at, parts in zip(itertools.product(*self.axes.values()), points, strict=True):
            point: Settings = {}
            for part in parts:
                point |= part
            yield "-".join((self.name, *at)), point


def read_sweep(path: Path, extra: Mapping[str, Any] | None = None) -> Sweep:
    """Return the sweep in a yaml file; ``extra`` settings win over its base.

    Raises ConfigError if there is no such file, a key is not known, a value has the wrong form, or a setting
    is given twice.
    """
    there = Path("sweeps") / path.name
    hint = f"; did you mean {there}?" if there.is_file() else "; sweeps/ has those of the paper"
    parts = read_yaml("sweep", path, why_removed("sweep", path) or f"is not a file{hint}")
    require(bool(parts), "sweep", path, "is empty; sweeps/adder.yaml is a small one")
    refuse_removed((key, "") for key in parts)
    names = {f.name for f in fields(Sweep)}
    for key in parts:
        parts_of = f"is not a part of a sweep; known: {', '.join(sorted(names))}"
        require(key in names, key, parts[key], parts_of)
    cells, grid = _mapping("cells", parts.get("cells")), _mapping("grid", parts.get("grid"))
    hours = parts.get("hours")
    amount = hours is None or (type(hours) in (int, float) and hours >= 0)
    require(amount, "hours", hours, "must be what one run takes: a number of hours, 0 or more")
    sweep = Sweep(
        name=str(parts.get("name", path.stem)),
        base=_mapping("base", parts.get("base")) | dict(extra or {}),
        cells={name: _mapping(f"cells.{name}", cell) for name, cell in cells.items()},
        grid=tuple(_axis(keys, values) for keys, values in grid.items()),
        seeds=_seeds(parts.get("seeds", [1])),
        skip=tuple(_mapping("skip", rule) for rule in _list("skip", parts.get("skip", []))),
        hours=hours,
        select=tuple(_list("select", parts.get("select", []))),
        slurm=_mapping("slurm", parts.get("slurm")),
        tests=_tests(parts.get("tests", [])),
    )
    _check(sweep, extra or {})
    return sweep


def read_yaml(key: str, path: Path, missing: str) -> Settings:
    """Return the mapping in a yaml file, {} for an empty one. Raises ConfigError."""
    require(path.is_file(), key, path, missing)
    try:
        raw = OmegaConf.to_container(OmegaConf.create(parsed(path.read_text("utf-8")) or {}), resolve=True)
    except (YAMLError, OmegaConfBaseException, ValueError, TypeError) as error:
        raise ConfigError(key, path, f"is not a yaml file: {' '.join(str(error).split())}") from error
    require(isinstance(raw, dict), key, path, "must be a mapping of settings to values")
    return _mapping(key, raw)


def matches(rule: Settings, settings: Settings) -> bool:
    """Whether ``settings`` has every value of ``rule``; a list in a rule stands for any of its values."""
    return all(
        key in settings and settings[key] in (value if isinstance(value, list) else [value])
        for key, value in rule.items()
    )


def override(key: str, value: Any) -> str:
    """Return ``key=value`` so that Hydra's command line reads the same value back. Quoting for a shell is not
    included."""
    return f"{key}={_text(value)}"


def parse_overrides(words: list[str]) -> Settings:
    """Return ``["loss=dpo", "lr=1e-5"]`` as settings. Raises ConfigError for a word that is not
    ``key=value``."""
    settings: Settings = {}
    for word in words:
        key, equals, value = word.partition("=")
        require(bool(equals and key), "setting", word, "must be NAME=VALUE, as in lr=1e-5")
        require(key not in settings, key, value, "is given twice")
        try:
            read: Any = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={value}"]))
        except (YAMLError, OmegaConfBaseException) as error:
            why = " ".join(str(error).split())
            problem = f"is no value that yaml can read ({why}); close every bracket and quote"
            raise ConfigError(key, value, problem) from error
        settings[key] = read["value"]
    return settings


def _text(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(_text, value)) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_text(item)}" for key, item in value.items()) + "}"
    if isinstance(value, str) and not (_PLAIN.fullmatch(value) and value.lower() not in _WORDS):
        return str(QuotedString(value, Quote.single).with_quotes())
    return str(value)


def labels(part: Settings) -> str:
    """Return a point on an axis as it appears in the names of cells."""
    return "-".join(label(key, value) for key, value in part.items())


def label(key: str, value: Any) -> str:
    """Return a setting's part of a cell's name: loss=dpo -> dpo (config/loss is a folder); humanline=false ->
    no_humanline; model.max_grad_norm=4 -> max_grad_norm4."""
    last = key.rsplit(".", 1)[-1]
    if isinstance(value, bool):
        return last if value else f"no_{last}"
    text = re.sub(r"[^A-Za-z0-9._-]+", "_", _text(value)).strip("_")
    return text if (FOLDER / key).is_dir() else f"{last}{text}"


def unselected(cell: str, selected: Settings) -> str:
    """Return a cell's name without its ``selected`` settings."""
    for key, value in selected.items():
        cell = cell.replace(f"-{label(key, value)}", "")
    return cell


def _axis(keys: str, values: Any) -> tuple[Settings, ...]:
    """Return the alternatives of one line of the grid."""
    names, ranged = [name.strip() for name in keys.split(",")], isinstance(values, dict)
    alternatives: list[Any] = _range(keys, values) if ranged else _list(f"grid.{keys}", values)
    require(bool(alternatives), f"grid.{keys}", values, "has no value")
    if len(names) == 1:
        return tuple({names[0]: value} for value in alternatives)
    for value in alternatives:
        good = isinstance(value, list) and len(value) == len(names)
        require(good, f"grid.{keys}", value, f"must be a list of {len(names)} values")
    return tuple(dict(zip(names, value, strict=True)) for value in alternatives)


def _range(key: str, spec: Settings) -> list[float]:
    """Return the values of a range, both ends included: ``{from: 1, to: 64, times: 4}`` -> 1, 4, 16, 64;
    ``{from: 0, to: 1, plus: 0.5}`` -> 0, 0.5, 1."""
    form = "must be {from: a, to: b, plus: step} or {from: a, to: b, times: factor}, step > 0, factor > 1, a > 0 with times"  # noqa: E501
    numbers = all(isinstance(value, int | float) and math.isfinite(value) for value in spec.values())
    forms = ({"from", "to", "plus"}, {"from", "to", "times"})
    require(numbers and set(spec) in forms, f"grid.{key}", spec, form)
    start, end, plus = spec["from"], spec["to"], "plus" in spec
    step = spec["plus" if plus else "times"]
    require(end >= start and (step > 0 if plus else step > 1 and start > 0), f"grid.{key}", spec, form)
    steps = (end - start) / step if plus else math.log(end / start, step)
    count = math.floor(steps + 1e-9) + 1
    require(count <= MOST_RUNS, f"grid.{key}", spec, f"has {count:,} values, {_TOO_MANY}")
    values = [start + i * step if plus else start * step**i for i in range(count)]
    # rounded, so that 0.1 + 0.2 is 0.3
    return [value if isinstance(value, int) else float(f"{value:.12g}") for value in values]


def _check(sweep: Sweep, extra: Mapping[str, Any]) -> None:
    for part in (sweep.base, *sweep.cells.values(), *itertools.chain(*sweep.grid)):
        refuse_removed(part.items())
    for key in sweep.varied | set(sweep.base):
        reserved = "is given by the sweep to each of its runs; seeds go under seeds:"
        require(key not in OWN_KEYS, key, "…", reserved)
    for key in sweep.varied & set(extra):
        raise ConfigError(key, extra[key], f"is a part of the grid of sweep {sweep.name}; change it there")
    axes = [set().union(*axis) for axis in sweep.grid] + [set().union(*sweep.cells.values())]
    for key in sweep.varied:
        require(sum(key in axis for axis in axes) == 1, key, "…", "stands in two parts of the grid")
    for key in sweep.select:
        require(key in sweep.varied, "select", key, "is not a key of the grid")
    cells = sweep.compared if sweep.tests else []
    for test in sweep.tests:
        for cell in itertools.chain(*test.sides):
            names = ", ".join(cells)
            require(cell in cells, f"tests: {test.name}: cells", cell, f"is no cell of the sweep: {names}")
    enough = len(sweep.seeds) > 1 or not sweep.tests
    require(enough, "seeds", list(sweep.seeds), "must be two or more: tests are paired by seed")


def _tests(value: Any) -> tuple[PlannedTest, ...]:
    tests: list[PlannedTest] = []
    for i, each in enumerate(_list("tests", value)):
        test = typed(_mapping("tests", each), PlannedTest, f"tests[{i}].")
        test = replace(test, name=test.name or test.difference)
        unique = all(test.name != other.name for other in tests)
        require(unique, f"tests[{i}].name", test.name, "must be a text that no other test has")
        tests.append(test)
    return tuple(tests)


def _seeds(value: Any) -> tuple[int, ...]:
    seeds = range(1, value + 1) if type(value) is int else value if isinstance(value, list) else ()
    good = len(seeds) > 0 and all(type(seed) is int for seed in seeds[:MOST_RUNS])
    good = good and len(set(seeds[:MOST_RUNS])) == len(seeds)
    require(good, "seeds", value, "must be a list of different whole numbers, or how many (5: 1 to 5)")
    return tuple(seeds)


def _mapping(key: str, value: Any) -> Settings:
    require(value is None or isinstance(value, dict), key, value, "must be a mapping of settings to values")
    return {str(name): item for name, item in (value or {}).items()}


def _list(key: str, value: Any) -> list[Any]:
    require(isinstance(value, list), key, value, f"must be a list, as in [{value}]")
    return list(value)
