"""Import of torchao, which only requirements/small-gpus.txt installs."""

from __future__ import annotations

import importlib
import logging
from types import ModuleType

from common.errors import ConfigError


def import_with_torchao(module: str, key: str, value: str, otherwise: str) -> ModuleType:
    """Import and return ``module``, which belongs to torchao or imports it. The import takes two seconds, so
    it happens only when the module is first needed. Raises ConfigError about ``key`` if torchao is not
    installed; ``otherwise`` tells the user the alternative.

    Warnings during the import are suppressed: they concern kernels and names that nothing here uses.
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
