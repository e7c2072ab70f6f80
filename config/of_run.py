"""The interpolation ``${of_run:key,default}`` for a model's file, which reads the model setting ``key`` from
the run whose folder ``name_or_path`` is.

If there is no such run, the value is ``default``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from yaml import YAMLError  # type: ignore[import-untyped]

from common.files import regular_file
from config.files import parsed


def of_run(key: str, default: Any, *, _parent_: DictConfig) -> Any:
    """Return the setting ``key`` of the run whose folder, or whose ``model`` folder, ``name_or_path`` is;
    otherwise ``default``. A model thus keeps the setting that it was trained with."""
    if OmegaConf.is_missing(_parent_, "name_or_path") or not _parent_.get("name_or_path"):
        return default
    path = Path(str(_parent_.name_or_path))
    folder = path.parent if path.name == "model" else path
    try:
        return parsed(regular_file(folder / "config.yaml").read_text(encoding="utf-8"))["model"][key]
    except (OSError, ValueError, TypeError, KeyError, YAMLError):
        return default


OmegaConf.register_new_resolver("of_run", of_run, replace=True)
