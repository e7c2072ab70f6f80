"""Reading of the settings files in this folder as plain data, including files that the command line did not
choose."""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import yaml  # type: ignore[import-untyped]
from omegaconf._utils import get_yaml_loader

from common.errors import ConfigError, UserError

FOLDER = Path(__file__).parent


def of_project(path: str | None) -> str | None:
    """Return the path of one of the project's own ``assets`` as it is found from the working directory, or
    else in the project's folder; another path as it is."""
    if path is None or not path.startswith("assets/") or os.path.exists(path):
        return path
    beside = FOLDER.parent / path
    return str(beside) if beside.exists() else path


class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """A YAML loader that reads like OmegaConf's but ten times faster: 1e-5 is a number, a date is a text, and
    a repeated key is an error."""

    yaml_implicit_resolvers: ClassVar = get_yaml_loader().yaml_implicit_resolvers

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys: set[str] = set()
        for key, _ in node.value:
            if str(key.value) in keys:
                fault = f"found duplicate key {key.value}"
                raise yaml.MarkedYAMLError(problem=fault, problem_mark=key.start_mark)
            keys.add(str(key.value))
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


_ALIAS = re.compile(r"(^|[\s\[{,:?-])\*[^\s]")
MOST_VALUES = 100_000
"""Number of values that a yaml text with aliases may stand for."""


def too_many(text: str) -> bool:
    """Return whether the aliases of a yaml text stand for more than ``MOST_VALUES`` values, as a few that
    refer to each other do, or for themselves. Nothing is built. Raises YAMLError."""
    return bool(_ALIAS.search(text)) and _values(yaml.compose(text, Loader), {}) > MOST_VALUES


def _values(node: Any, known: dict[int, float]) -> float:
    """Return the number of values of a node with everything in it, written out; ``known``: by its id."""
    if id(node) not in known:
        known[id(node)] = math.inf  # until it is known: a node within itself has no end
        inside = node.value if isinstance(node, yaml.CollectionNode) else ()
        parts = itertools.chain(*inside) if isinstance(node, yaml.MappingNode) else inside
        known[id(node)] = 1 + sum(_values(part, known) for part in parts)
    return known[id(node)]


def parsed(text: str) -> Any:
    """Return the content of a yaml text as plain data. Raises YAMLError, also for aliases as in ``too_many``
    and endless nesting, and ValueError or TypeError for a malformed number or key."""
    try:
        if too_many(text):
            raise yaml.YAMLError(f"its aliases stand for more than {MOST_VALUES:,} values")
        return yaml.load(text, Loader)
    except RecursionError as error:
        raise yaml.YAMLError("it is nested too deeply") from error


def wrong_line(error: yaml.YAMLError, path: Path | None = None) -> str:
    """Return the file, the line and what is wrong there. ``path``: the file, where it was read as a text."""
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return " ".join(f"{path or ''} {error}".split())
    place = path or Path(error.problem_mark.name)
    place = place.relative_to(FOLDER.parent) if place.is_relative_to(FOLDER) else place
    line = error.problem_mark.line + 1
    return f"{place}, line {line}: {error.problem}; correct this line or the one above"


def not_utf8(folders: Iterable[Path]) -> list[str]:
    """Return the yaml files in ``folders`` that are not in UTF-8, which the error of reading one does not
    say."""
    return [
        str(path)
        for folder in folders
        for path in sorted(folder.rglob("*.yaml"))
        if "\ufffd" in path.read_text(encoding="utf-8", errors="replace")
    ]


def _content(path: Path) -> Any:
    """Return the content of a file of settings. Raises UserError with the line that yaml cannot read."""
    try:
        return parsed(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise UserError(wrong_line(error, path)) from error


def files_of(group: str) -> list[str]:
    """Return the names of the files of config/<group> that one may choose."""
    return sorted(path.stem for path in (FOLDER / group).glob("*.yaml") if not path.stem.startswith("_"))


def group_file(group: str, key: str, name: str) -> dict[str, Any]:
    """Return the settings of config/<group>/<name>.yaml merged over those of the files that it starts from.
    Raises ConfigError about the setting ``key``."""
    path = FOLDER / group / f"{name}.yaml"
    if not path.is_file():
        message = f"there is no such file in config/{group}; there are {', '.join(files_of(group))}"
        raise ConfigError(key, name, message)
    file_settings: dict[str, Any] = _content(path)
    settings: dict[str, Any] = {}
    for base in file_settings.pop("defaults", []):
        if base != "_self_":
            settings |= group_file(group, key, base)
    return settings | file_settings


@cache
def section(place: str) -> Mapping[str, Any]:
    """Return the content of ``file.yaml:dotted.section`` in config/, with interpolations left unresolved."""
    file, _, dotted = place.partition(":")
    tree: Any = section(file) if dotted else _content(FOLDER / file)
    for key in filter(None, dotted.split(".")):
        tree = tree[key]
    assert isinstance(tree, dict), f"{place} is no section"
    return tree


def walk(tree: Any, lists: bool = False, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of each section, list and value of nested settings; with ``lists`` also of
    what is in a list."""
    inside: Iterable[tuple[Any, Any]] = tree.items() if isinstance(tree, dict) else ()
    if lists and isinstance(tree, list | tuple):
        inside = enumerate(tree)
    for name, value in inside:
        key = f"{prefix}.{name}".lstrip(".")
        yield key, value
        yield from walk(value, lists, key)
