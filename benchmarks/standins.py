"""Stand-ins for omegaconf and pyarrow where these are not installed (a bare GPU machine); import this module
first. The benchmarks build the typed configuration directly and read no data file, so the names only have to
exist."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

NAMES = {
    "omegaconf": ("DictConfig", "OmegaConf"),
    "omegaconf.errors": (
        "ConfigKeyError",
        "MissingMandatoryValue",
        "OmegaConfBaseException",
        "ValidationError",
    ),
    "pyarrow": (),
    "pyarrow.parquet": (),
}
"""Module -> the names that the project imports from it."""

for top in ("omegaconf", "pyarrow"):
    if importlib.util.find_spec(top) is None:
        for module in (name for name in NAMES if name.split(".")[0] == top):
            sys.modules[module] = ModuleType(module)
            for name in NAMES[module]:
                setattr(sys.modules[module], name, type(name, (Exception,), {}))
