"""Import of large libraries, and of functions and classes that a setting names by their import path."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from common.errors import ConfigError
from common.progress import phase


@contextmanager
def importing(library: str) -> Iterator[None]:
    """Show that ``library`` is imported, where it is not yet. What an import makes stays until the program
    ends, so the garbage collector does not look through it: not meanwhile, which takes a fifth of the time,
    and not later."""
    if library in sys.modules:
        yield
        return
    gc.disable()
    try:
        with phase(f"import {library}"):
            yield
    finally:
        gc.freeze()
        gc.enable()


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


def check_importable(key: str, path: str) -> None:
    """Raise ConfigError where ``import_function`` would because the module is not there or does not mention
    the name. The module itself is not imported."""
    module, _, name = path.rpartition(".")
    try:
        found = importlib.util.find_spec(module)
    except (ImportError, AttributeError, ValueError):
        found = None
    source = "" if found is None or found.origin is None else found.origin
    if found is None or (
        source.endswith(".py")
        and not re.search(rf"\b({re.escape(name)}|__getattr__|import \*)", Path(source).read_text("utf-8"))
    ):
        import_function(key, path)  # says what is wrong
