"""Import this first where omegaconf or pyarrow is not installed (a bare GPU machine): the typed configuration
is built directly in the benchmarks and no file of data is read, so their names only have to exist."""

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
"""Module -> the names that are asked of it while the project is imported."""

for top in ("omegaconf", "pyarrow"):
    if importlib.util.find_spec(top) is None:
        for module in (name for name in NAMES if name.split(".")[0] == top):
            sys.modules[module] = ModuleType(module)
            for name in NAMES[module]:
                setattr(sys.modules[module], name, type(name, (Exception,), {}))
