"""Import this first where omegaconf is not installed (a bare GPU machine): the typed configuration is built directly in the benchmarks,
nothing is composed or parsed, so its names only have to exist."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

if importlib.util.find_spec("omegaconf") is None:
    module, errors = ModuleType("omegaconf"), ModuleType("omegaconf.errors")
    for name in ("DictConfig", "OmegaConf"):
        setattr(module, name, type(name, (), {}))
    for name in ("ConfigKeyError", "MissingMandatoryValue", "OmegaConfBaseException", "ValidationError"):
        setattr(errors, name, type(name, (Exception,), {}))
    sys.modules |= {"omegaconf": module, "omegaconf.errors": errors}
