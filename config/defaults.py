"""Defaults stand once, in the yaml files that people read. The dataclasses of the schema take theirs from
there."""

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

    ``places``: files of config/, each with an optional section, as in ``config.yaml:rounds``; the first one
    that has a key gives its value. A field that no place has, or that has a default of its own, stays as it
    is. Fields that a base class leaves without a default are filled too.
    """

    def fill(cls: type[T]) -> type[T]:
        for base in cls.__mro__[1:]:
            for inherited in fields(base) if is_dataclass(base) else ():
                if inherited.default is inherited.default_factory:  # dataclasses.MISSING, both
                    cls.__annotations__.setdefault(inherited.name, inherited.type)
        for name in cls.__annotations__:
            if name not in vars(cls) and (found := _value(places, name)) is not MISSING:
                setattr(cls, name, _copied(found) if isinstance(found, list | dict) else found)
        return cls

    return fill


def with_defaults(section: type[T], **values: Any) -> T:
    """A section whose other fields have their defaults, which a type checker cannot see."""
    return section(**values)


def nested(section: type[T]) -> T:
    """The default of a field that is a section of its own: all of that section's defaults."""
    return cast(T, field(default_factory=section))


def _copied(value: Any) -> Any:
    """The default of a field whose value could be changed in place."""
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
    """What stands at ``file.yaml:dotted.section`` of config/, interpolations as they are written."""
    file, _, dotted = place.partition(":")
    tree: Any = parsed((FOLDER / file).read_text(encoding="utf-8"))
    for key in filter(None, dotted.split(".")):
        tree = tree[key]
    assert isinstance(tree, dict), f"{place} is no section"
    return tree
