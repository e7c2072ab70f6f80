"""Import of large libraries, and of functions and classes that a setting names by their import path."""

from __future__ import annotations

import ast
import atexit
import gc
import importlib
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
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
        atexit.register(gc.unfreeze)  # libraries in C++ complain of what Python has not taken down by then


def _see_working_directory() -> None:
    """From now on modules of the working directory are found, after all others: a program that is started by
    its path has the folder of that path alone."""
    if not {"", os.getcwd()} & {*sys.path}:
        sys.path.append(os.getcwd())


def import_function(key: str, path: str) -> Any:
    """Return the function or class that the setting ``key`` names as ``module.name``. Raises ConfigError."""
    _see_working_directory()
    module, name = module_and_name(path)
    if module.startswith(".") and not module.endswith(".py"):
        raise ConfigError(key, path, "is a place among folders; write module.function or FILE.py:function")
    try:
        function = getattr(_imported_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(key, path, f"cannot be imported ({error}); give it as module.function") from error
    if not callable(function):
        raise ConfigError(key, path, "is not a function")
    return function


def module_and_name(path: str) -> tuple[str, str]:
    """Return the two parts of an import path: ``module.name``, or ``FILE.py:name`` for a file of any name."""
    module, _, name = path.replace(".py:", ".py.").rpartition(".")
    return module, name


def _own_file(module: str) -> Path | None:
    """Return the file where ``module`` is the path of one, or is in the working directory and Python would
    find another of this name, such as one of its own; None for any other."""
    if module.endswith(".py"):
        return Path(module).resolve() if os.path.isfile(module) else None
    beside = Path(f"{module}.py").resolve()
    if "." in module or not beside.is_file():
        return None
    spec = importlib.util.find_spec(module)
    return None if spec is not None and Path(spec.origin or "").resolve() == beside else beside


def _imported_module(module: str) -> Any:
    file = _own_file(module)
    if file is None:
        return importlib.import_module(module)
    name = str(file)
    if name not in sys.modules and (spec := importlib.util.spec_from_file_location(name, file)) is not None:
        if str(file.parent) not in sys.path:
            sys.path.append(str(file.parent))
        sys.modules[name] = importlib.util.module_from_spec(spec)
        assert spec.loader is not None
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def check_keys(key: str, tree: Mapping[str, Any], takes: Mapping[str, inspect.Parameter]) -> None:
    """Raise ConfigError for a setting of ``tree`` that the class ``_target_`` does not take, and for one that
    it needs and ``tree`` lacks. ``takes``: the class's parameters that settings may give."""
    anything = any(p.kind is p.VAR_KEYWORD for p in takes.values())
    problem = f"{tree['_target_']} does not take it; it takes {', '.join(takes) or 'no settings'}"
    for word, value in tree.items():
        if word != "_target_" and word not in takes and not anything:
            raise ConfigError(f"{key}.{word}", value, problem)
    for word, p in takes.items():
        needed = p.default is p.empty and p.kind is not p.VAR_KEYWORD
        if needed and word not in tree:
            raise ConfigError(f"{key}.{word}", "???", "has no default; give it")


def check_importable(key: str, path: str) -> None:
    """Raise ConfigError where ``import_function`` would because the module is not there or does not mention
    the name. The module itself is not imported."""
    module, name = module_and_name(path)
    file = module_file(module)
    mentions = rf"\b({re.escape(name)}|__getattr__|import \*)"
    if file is None or (file.suffix == ".py" and not re.search(mentions, file.read_text("utf-8"))):
        import_function(key, path)  # says what is wrong


def module_file(module: str) -> Path | None:
    """Return the file of a module, which is not imported; None if it is not found."""
    _see_working_directory()
    try:
        if (file := _own_file(module)) is not None:
            return file
        spec = importlib.util.find_spec(module)
    except (ImportError, AttributeError, ValueError):
        return None
    return None if spec is None else Path(spec.origin or "")


def modules_beside(module: str) -> dict[str, Path]:
    """Return path -> file of a module's source and, unless it is an installed package's, of the modules in
    its folder and below that it imports, followed from import to import; {} for a module without source.
    Nothing is imported."""
    file = module_file(module)
    if file is None or file.suffix != ".py" or not file.is_file():
        return {}
    folder = file.parent
    package = [] if module.endswith(".py") else module.split(".")
    package = package if file.name == "__init__.py" else package[:-1]
    top = folder if not package else folder.parents[len(package) - 1]
    found: dict[str, Path] = {}
    left = [file]
    while left:
        one = left.pop()
        found[str(one.relative_to(folder))] = one
        new = [p for p in _imported(one, top) if p.is_relative_to(folder) and p not in found.values()]
        left += new if "site-packages" not in one.parts else []
    return found


def _imported(file: Path, top: Path) -> Iterator[Path]:
    """Yield the files below ``top``, a folder of the search path, that the source of a module imports."""
    with suppress(SyntaxError, ValueError):  # whoever imports it says so
        for node in ast.walk(ast.parse(file.read_bytes())):
            names = [one.name for one in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            places = [top.joinpath(*name.split(".")) for name in names]
            if isinstance(node, ast.ImportFrom):
                base = file.parents[node.level - 1] if node.level else top
                base = base.joinpath(*node.module.split(".")) if node.module else base
                places = [base, *(base / name for name in names)]
            for place in places:
                yield from (p for p in (place.with_suffix(".py"), place / "__init__.py") if p.is_file())


@cache
def _source(module: str) -> list[ast.stmt]:
    """Return what stands in the source of a module, which is not imported; [] where it has none."""
    file = module_file(module)
    return ast.parse(file.read_text("utf-8")).body if file is not None and file.suffix == ".py" else []


def _place(module: str, name: str) -> str:
    """Return the import path of what ``name`` stands for in the source of a module."""
    imported = (node for node in _source(module) if isinstance(node, ast.ImportFrom))
    places = {one.asname or one.name: f"{node.module}.{one.name}" for node in imported for one in node.names}
    return places.get(name, f"{module}.{name}")


def written_type(path: str) -> str | None:
    """Return the import path of the class that annotates the first parameter of the function ``path`` in the
    source of its module, which is not imported; None where there is none."""
    module, name = module_and_name(path)
    for part in _source(module):
        if isinstance(part, ast.FunctionDef) and part.name == name and part.args.args:
            annotation = part.args.args[0].annotation
            return _place(module, ast.unparse(annotation)) if annotation is not None else None
    return None


def written_attributes(path: str) -> dict[str, Any]:
    """Return name -> value of the literals that the class ``path`` and the classes that it extends have as
    attributes, as the source of their modules has them, without an import."""
    module, name = module_and_name(path)
    body = _source(module)
    attributes: dict[str, Any] = {}
    for part in body:
        if not isinstance(part, ast.ClassDef) or part.name != name:
            continue
        for base in reversed(part.bases):
            base = base.value if isinstance(base, ast.Subscript) else base
            attributes |= written_attributes(_place(module, ast.unparse(base)))
        for line in part.body:
            target = line.targets[0] if isinstance(line, ast.Assign) else getattr(line, "target", None)
            if isinstance(target, ast.Name) and (value := getattr(line, "value", None)) is not None:
                with suppress(ValueError):
                    attributes[target.id] = ast.literal_eval(value)
    return attributes
