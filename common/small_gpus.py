"""What requirements/small-gpus.txt installs: torchao, which no other list has."""

from __future__ import annotations

import importlib
import logging
from types import ModuleType

from common.errors import ConfigError


def import_with_torchao(module: str, key: str, value: str, otherwise: str) -> ModuleType:
    """A module that is torchao's or imports it, which costs two seconds, imported when it is first asked for.
    Raises ConfigError about ``key`` where it is not installed; ``otherwise`` is what else to do.

    Its warnings as it is imported are of kernels and names that nothing here uses.
    """
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        return importlib.import_module(module)
    except (ImportError, AttributeError) as missing:
        raise ConfigError(
            key,
            value,
            f"torchao is not installed as it is needed ({missing}): pip install -r "
            f"requirements/small-gpus.txt, or {otherwise}",
        ) from missing
    finally:
        logging.disable(before)
