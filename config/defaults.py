"""Decorators and helpers that give the dataclasses of the schema their defaults from the yaml files, the only
place where defaults are written."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import field, fields, is_dataclass
from functools import cache, partial
from typing import Any, TypeVar, cast

from config.files import FOLDER, parsed

T = TypeVar("T")


def yaml_defaults(*places: str) -> Callable[[type[T]], type[T]]:
    """Give the fields of a class the values that they have in config/, before ``dataclass`` reads them.

    ``places`` are files of config/, each with an optional section, for example ``config.yaml:rounds``. The
    first place that has a key gives its value. A field stays unchanged if no place has it or if it has a
    default of its own. Fields that a base class leaves without a default are filled too.
    """

    def fill(cls: type[T]) -> type[T]:
        for base in cls.__mro__[1:]:
            for inherited in fields(base) if is_dataclass(base) else ():
                if inherited.default is inherited.default_factory:  # both are dataclasses.MISSING
                    cls.__annotations__.setdefault(inherited.name, inherited.type)
        for name in cls.__annotations__:
            if name not in vars(cls) and (found := _value(places, name)) is not MISSING:
                setattr(cls, name, _copied(found) if isinstance(found, list | dict) else found)
        return cls

    return fill


def with_defaults(section: type[T], **values: Any) -> T:
    """Return a section built from ``values``, with the defaults for all other fields. A type checker does not
    see these defaults, so it would reject the plain call."""
    return section(**values)


def nested(section: type[T]) -> T:
    """Return the default of a field that is itself a section: that section with all its defaults."""
    return cast(T, field(default_factory=section))


def _copied(value: Any) -> Any:
    """Return a field default that gives each instance its own copy of a mutable value."""
    return field(default_factory=partial(copy.deepcopy, value))


MISSING: Any = object()


def _value(places: tuple[str, ...], name: str) -> Any:
    for place in places:
        values = section(place)
        if name in values:
            return values[name]
    return MISSING


@cache
def section(place: str) -> Mapping[str, Any]:
    """Return the content of ``file.yaml:dotted.section`` in config/, with interpolations left unresolved."""
    file, _, dotted = place.partition(":")
    tree: Any = parsed((FOLDER / file).read_text(encoding="utf-8"))
    for key in filter(None, dotted.split(".")):
        tree = tree[key]
    assert isinstance(tree, dict), f"{place} is no section"
    return tree
