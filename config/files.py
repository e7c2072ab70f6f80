"""The settings files of this folder as plain data, for what reads one that the command line did not
choose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from common.errors import ConfigError

FOLDER = Path(__file__).parent


def data_file(key: str, name: str) -> dict[str, Any]:
    """The settings of config/data/<name>.yaml, over those of the files it starts from. Raises ConfigError,
    for the setting ``key``."""
    path = FOLDER / "data" / f"{name}.yaml"
    if not path.is_file():
        names = sorted(p.stem for p in path.parent.glob("*.yaml") if not p.stem.startswith("_"))
        raise ConfigError(key, name, f"there is no such file in config/data; there are {', '.join(names)}")
    found: dict[str, Any] = yaml.safe_load(path.read_text())
    settings: dict[str, Any] = {}
    for base in found.pop("defaults", []):
        if base != "_self_":
            settings |= data_file(key, base)
    return settings | found
