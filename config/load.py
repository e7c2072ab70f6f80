"""Typed settings from what Hydra composed or from a run's config.yaml, and back.

Everything that is refused here is refused before torch is imported, so that a wrong command line costs a second."""

from __future__ import annotations

import difflib
import hashlib
import math
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar, get_args, get_type_hints

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException, ValidationError

from common.errors import ConfigError
from config.schema import Config
from config.schema_data import MixPart

T = TypeVar("T")


OPERATIONAL = (
    "exp_name",
    "runs_dir",
    "cache_dir",
    "overwrite",
    "resume",
    "dry_run",
    "keep_checkpoints",
    "keep_best",
    "save_every",
    "wandb",
    "replicas",
    "watchdog_seconds",
)
"""Settings that change nothing of what is computed: a run may go on with others."""


def load(cfg: DictConfig) -> Config:
    """The checked Config of what Hydra composed. Raises ConfigError, see ``typed``."""
    return typed(cfg, Config)


def typed(cfg: DictConfig, schema: type[T]) -> T:
    """``cfg`` as the dataclass ``schema``.

    Raises ConfigError: an unknown key (with the nearest known one), a wrong type, a missing value, a value out of range, an
    impossible combination.
    """
    raw = OmegaConf.to_container(cfg, resolve=True)
    assert isinstance(raw, dict)
    _refuse_unknown({str(key): value for key, value in raw.items()}, schema, "")
    cfg = OmegaConf.create(_infinities(raw))
    try:
        merged = OmegaConf.merge(OmegaConf.structured(schema), cfg)
        config = OmegaConf.to_object(merged)
    except MissingMandatoryValue as error:
        key = (error.full_key or "").removeprefix(f"{schema.__name__}.")
        raise ConfigError(key, "???", "has no default; set it on the command line") from error
    except (ValidationError, ConfigKeyError) as error:
        key = error.full_key or "config"
        first_line = str(error.msg or error).splitlines()[0]
        raise ConfigError(key, OmegaConf.select(cfg, key), f"{first_line} (wrong type)") from error
    except OmegaConfBaseException as error:
        raise ConfigError(error.full_key or "config", "?", str(error).splitlines()[0]) from error
    assert isinstance(config, schema)
    return config


def split_settings(cfg: DictConfig, schema: type[T]) -> tuple[T, DictConfig]:
    """(a program's own settings, typed; those of a run, with it gone from them): of a file that starts from config.yaml.

    A field whose metadata has a ``key`` stands under that name in the file. Raises ConfigError as ``typed`` does.
    """
    rest = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=False)
    assert isinstance(rest, dict)
    keys = {item.name: str(item.metadata.get("key", item.name)) for item in fields(schema)}  # type: ignore[arg-type]
    own = {name: rest.pop(key) for name, key in keys.items()}
    try:
        return typed(OmegaConf.create(own), schema), OmegaConf.create(rest)
    except ConfigError as error:
        raise ConfigError(keys.get(error.key, error.key), error.value, error.remedy) from error


def _infinities(tree: Any) -> Any:
    """``tree`` with yaml's words for infinity as numbers: on the command line Hydra reads ``.inf`` as a text."""
    if isinstance(tree, dict):
        return {key: _infinities(value) for key, value in tree.items()}
    return (
        {".inf": math.inf, "+.inf": math.inf, "-.inf": -math.inf}.get(tree, tree)
        if isinstance(tree, str)
        else tree
    )


def _refuse_unknown(raw: dict[str, Any], schema: Any, prefix: str) -> None:
    """Raise ConfigError for a key that the schema does not have: it would be read by nobody."""
    known = get_type_hints(schema)
    for key, value in raw.items():
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            did_you_mean = (
                f"; did you mean {prefix}{near[0]}?" if near else f"; known here: {', '.join(sorted(known))}"
            )
            raise ConfigError(
                f"{prefix}{key}", value, f"is not a setting, nothing would read it{did_you_mean}"
            )
        if key == "mix" and isinstance(value, list):
            for i, part in enumerate(value):
                _refuse_unknown(part, MixPart, f"{prefix}mix[{i}].")
        section = next((hint for hint in (known[key], *get_args(known[key])) if is_dataclass(hint)), None)
        if section is not None and isinstance(value, dict):
            _refuse_unknown(value, section, f"{prefix}{key}.")


def load_saved(text: str) -> Config:
    """The configuration that ``dump`` wrote. Raises ConfigError."""
    made = OmegaConf.create(text)
    assert isinstance(made, DictConfig)
    return load(made)


def dump(config: Config) -> str:
    """The configuration as yaml, as ``config.yaml`` of a run has it."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def run_name(config: Config, overrides: list[str]) -> str:
    """``exp_name``, or one made of loss, model, data, variant, seed and a hash of the overrides that change what is computed."""
    if config.exp_name is not None:
        return config.exp_name
    other = sorted(o for o in overrides if o.split("=")[0].lstrip("+~") not in OPERATIONAL)
    digest = hashlib.sha256("\n".join(other).encode()).hexdigest()[:6]
    return f"{config.loss['name']}-{config.model.name}-{config.data.name}-{config.variant}-s{config.seed}-{digest}"


def changed(before: str, now: Config) -> str | None:
    """The first setting that differs between a run's config.yaml and ``now`` and changes what is computed; None if there is none."""
    old, new = (
        _flat(OmegaConf.to_container(OmegaConf.create(before))),
        _flat(OmegaConf.to_container(OmegaConf.structured(now))),
    )
    return next(
        (
            key
            for key in sorted(old | new)
            if key.split(".")[0] not in OPERATIONAL and old.get(key, "absent") != new.get(key, "absent")
        ),
        None,
    )


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}"""
    if not isinstance(tree, dict):
        return {prefix: tree}
    return {
        name: value
        for key, item in tree.items()
        for name, value in _flat(item, f"{prefix}.{key}".lstrip(".")).items()
    }
