"""Import of a function or class that a setting names by its import path."""

from __future__ import annotations

import importlib
from typing import Any

from common.errors import ConfigError


def import_function(key: str, path: str) -> Any:
    """Return the function or class that the setting ``key`` names as ``module.name``. Raises ConfigError."""
    module, _, name = path.rpartition(".")
    if module.startswith("."):
        raise ConfigError(
            key,
            path,
            "is a place among folders; give it as module.function, of a module that is in the working "
            "directory or on PYTHONPATH",
        )
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(key, path, f"cannot be imported ({error}); give it as module.function") from error
    if not callable(found):
        raise ConfigError(key, path, "is not a function")
    return found
