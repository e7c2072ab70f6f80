"""Checks of the numbers that a loss takes."""

from __future__ import annotations

import inspect
import math
import re
from ast import literal_eval

from common.errors import one_of, require
from config.files import FOLDER, section
from config.schema import Config
from config.schema_trainer import loss_numbers

TAKES: dict[str, tuple[type | tuple[type, ...], str]] = {
    "float": ((int, float), "must be a number"),
    "int": (int, "must be a whole number"),
    "bool": (bool, "must be true or false"),
    "str": (str, "must be a text"),
}
"""The annotation of a loss's keyword argument -> (what its setting may be, what to say of another)."""


def check_numbers(config: Config, signature: inspect.Signature) -> None:
    """Raise ConfigError for a number that the loss of this ``signature`` does not take, lacks, or cannot
    use."""
    name, from_data = f"loss={config.loss['name']}", config.data.numbers or ()
    takes = {n: p for n, p in signature.parameters.items() if p.kind is inspect.Parameter.KEYWORD_ONLY}
    numbers = loss_numbers(config.loss, config.accepts.loss_keys)
    file = f"loss/{config.loss['name']}.yaml"
    # it may lie in another folder
    defaults = section(f"{file}:loss") if (FOLDER / file).is_file() else numbers
    for key, value in numbers.items():
        others = ", ".join(takes) or "no numbers"
        require(key in takes, f"loss.{key}", value, f"{name} does not take it; it takes {others}")
        # beta elsewhere weighs a penalty, and 0 means no penalty
        scales = key in ("beta", "tau") and config.accepts.beta_scales_rewards
        endless = defaults.get(key) == math.inf
        annotation = takes[key].annotation
        written = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
        _check_number(f"loss.{key}", value, written, scales, endless)
    for column in from_data:
        require(
            column in takes and column not in numbers,
            "data.numbers",
            config.data.numbers,
            f"{name} does not take {column}; one that does has it after * (docs/extend.md)",
        )
    for key, parameter in takes.items():
        there = key in numbers or key in from_data or parameter.default is not inspect.Parameter.empty
        where = f"{name} needs it; set it in config/loss/{config.loss['name']}.yaml"
        require(there, f"loss.{key}", "???", where)


def _check_number(key: str, value: object, annotation: str, scales: bool, endless: bool) -> None:
    """``scales``: whether the loss has no gradient at 0; ``endless``: whether its file has no bound."""
    kinds = re.sub(r"Literal\[.*\]", "", annotation).replace(" ", "").split("|")
    choices = [literal_eval(f"({literal},)") for literal in re.findall(r"Literal\[(.*?)\]", annotation)]
    if choices:
        one_of(key, value, (*((None,) if "None" in kinds else ()), *choices[0]))
    types, problem = next((TAKES[kind] for kind in kinds if kind in TAKES), (object, ""))
    if value is None and "None" in kinds:
        return
    require(isinstance(value, types) and (types is bool or not isinstance(value, bool)), key, value, problem)
    if "float" in kinds:
        assert isinstance(value, int | float)
        require(value >= 0, key, value, "must be 0 or more")
        require(endless or math.isfinite(value), key, value, "must be finite")
        require(value > 0 or not scales, key, value, "must be above 0, or the loss has no gradient")
