"""Conversion of a mapping into a dataclass of settings, with ConfigError for unknown keys, wrong types and
missing values."""

from __future__ import annotations

import math
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, TypeVar, get_args, get_origin

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException, ValidationError

from common.errors import ConfigError, require
from common.secrets import remember
from config.unknown import NOTHING, names, remedy, section_says, type_hints

T = TypeVar("T")

INFINITE = ("log_epsilon_P", "log_epsilon_R", "sync_kl", "model.max_grad_norm", "correction.high")
"""Settings that may be infinite: a bound that no number reaches."""
_MAPPINGS: dict[Any, str] = {
    dict[str, str] | None: "{prompt: question}",
    dict[str, Any] | None: "{enable_thinking: false}",
}
"""Mappings that may be null, with an example."""


def typed(cfg: DictConfig, schema: type[T], prefix: str = "") -> T:
    """Return ``cfg`` as an instance of the dataclass ``schema``. ``prefix`` is its place among all settings,
    for example ``reward.judge.``, and appears in messages.

    Raises ConfigError for an unknown key (with the nearest known one), a wrong type, a missing value, a value
    out of range or an impossible combination.
    """
    raw = OmegaConf.to_container(cfg, resolve=True)
    assert isinstance(raw, dict)
    remember(raw)
    _refuse_unknown({str(key): value for key, value in raw.items()}, schema, prefix, schema, prefix)
    cfg = OmegaConf.create(_infinities(raw))
    try:
        merged = OmegaConf.merge(structured(schema), cfg)  # type: ignore[arg-type]
        config = OmegaConf.to_object(merged)
    except MissingMandatoryValue as error:
        key = (error.full_key or "").removeprefix(f"{schema.__name__}.")
        raise ConfigError(prefix + key, "???", "has no default; set it on the command line") from error
    except (ValidationError, ConfigKeyError) as error:
        key = error.full_key or "config"
        value = OmegaConf.select(cfg, key)
        raise ConfigError(prefix + key, value, _right_value(schema, prefix, key, value, error)) from error
    except OmegaConfBaseException as error:
        raise ConfigError(prefix + (error.full_key or "config"), "?", str(error).splitlines()[0]) from error
    assert isinstance(config, schema)
    refuse_not_finite(config, prefix)
    return config


def _right_value(schema: type, prefix: str, key: str, value: Any, error: OmegaConfBaseException) -> str:
    """Return what a setting of another type takes, with a value that is right."""
    first_line = str(error.msg or error).splitlines()[0]
    kinds = {"to Float": "a number", "to Integer": "a whole number", "valid bool": "true or false"}
    kind = next((kinds[name] for name in kinds if name in first_line), None)
    *sections, last = key.split(".")
    for part in sections:
        schema = type_hints(schema).get(part, object) if is_dataclass(schema) else object
    if kind is None or not is_dataclass(schema):
        return f"{first_line} (wrong type)"
    right = str(getattr(schema, last, None)).lower()
    right = {"none": "1"}.get(right, right) if kind != "true or false" else "true"
    return f"must be {kind}, as in {prefix}{key}={right}"


@cache
def structured(schema: type) -> DictConfig:
    """Return the settings of a dataclass with their types and defaults, to be merged with others and never
    changed: they are worked out once."""
    made = OmegaConf.structured(schema)
    assert isinstance(made, DictConfig)
    return made


def refuse_not_finite(found: Any, key: str = "", free: bool = False) -> None:
    """Raise ConfigError for a number in ``found``, the settings under ``key``, that is NaN, because every
    comparison with it is false, and for an infinite one outside of ``INFINITE``. With ``free``, as in a
    mapping of a loss's own settings, the code that reads a number knows whether it may be infinite."""
    if is_dataclass(found):
        start = f"{key}." if key and not key.endswith(".") else key
        for item in fields(found):
            refuse_not_finite(getattr(found, item.name), f"{start}{item.name}", free)
    elif isinstance(found, dict):
        for name, item in found.items():
            refuse_not_finite(item, f"{key}.{name}", True)
    elif isinstance(found, list | tuple):
        for i, item in enumerate(found):
            refuse_not_finite(item, f"{key}[{i}]", free)
    elif isinstance(found, float):
        require(not math.isnan(found), key, found, "is not a number; give a number")
        require(free or key in INFINITE or math.isfinite(found), key, found, "must be finite")


def _infinities(tree: Any) -> Any:
    """Return ``tree`` with YAML's words for infinity as numbers, because Hydra reads ``.inf`` on the command
    line as a text."""
    if isinstance(tree, dict):
        return {key: _infinities(value) for key, value in tree.items()}
    return (
        {".inf": math.inf, "+.inf": math.inf, "-.inf": -math.inf}.get(tree, tree)
        if isinstance(tree, str)
        else tree
    )


def _refuse_unknown(raw: dict[str, Any], schema: Any, prefix: str, whole: Any, start: str) -> None:
    """Raise ConfigError for a key that the schema does not have, because nothing would read it. ``whole`` is
    the schema of all settings, whose names begin with ``start``."""
    known = type_hints(schema)
    for key, value in raw.items():
        if key not in known:
            said = remedy(f"{prefix}{key}", str(value), names(whole, start))
            here = f"; known here: {', '.join(sorted(known))}" if said == NOTHING else ""
            raise ConfigError(f"{prefix}{key}", value, said + here)
        if known[key] in _MAPPINGS:
            said = f"is a mapping, as in {_MAPPINGS[known[key]]}"
            require(isinstance(value, dict | None), prefix + key, value, said)
        is_mapping = get_origin(known[key]) is dict or is_dataclass(known[key])
        if is_mapping and not isinstance(value, dict) and value != "???":
            said = f"is a mapping: give its settings, as in {prefix}{key}.name=value"
            if is_dataclass(known[key]):
                said = f"is a section, not a setting; {section_says(prefix + key, names(whole, start))}"
            raise ConfigError(prefix + key, value, said)
        section = _dataclass_in(known[key])
        if section is None:
            continue
        if isinstance(value, dict):
            _refuse_unknown(value, section, f"{prefix}{key}.", whole, start)
        for i, part in enumerate(value if isinstance(value, list) else []):
            required = "a mapping, as in {name: hh, weight: 0.7}"
            require(isinstance(part, dict), f"{prefix}{key}[{i}]", part, f"is one of {key}: {required}")
            _refuse_unknown(part, section, f"{prefix}{key}[{i}].", whole, start)


def _dataclass_in(hint: Any) -> Any:
    """Return the dataclass that a type hint is or contains, for example as a list item or beside None; return
    None if it contains none."""
    if is_dataclass(hint):
        return hint
    return next((found for part in get_args(hint) if (found := _dataclass_in(part)) is not None), None)
