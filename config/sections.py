"""Sections of settings as frozen pydantic dataclasses. A section's annotations say the types, ranges and
choices of its settings, config/*.yaml their defaults; every refusal of pydantic becomes a ConfigError here.

Types are strict: ``3.0`` is no whole number, ``yes`` is not true. A number where a text belongs is that text.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import field, fields, is_dataclass
from functools import cache, partial, wraps
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, cast, get_args, get_origin, get_type_hints

from omegaconf import DictConfig, OmegaConf
from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass as pydantic_dataclass
from pydantic.dataclasses import rebuild_dataclass
from pydantic_core.core_schema import no_info_before_validator_function

from common.errors import ConfigError
from common.secrets import scrub
from config.files import section
from config.unknown_keys import NOTHING, names, remedy, section_says, type_hints

T = TypeVar("T")

STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, validate_default=True, defer_build=True)
INFINITIES = {".inf": math.inf, "+.inf": math.inf, "-.inf": -math.inf}
"""YAML's words for infinity, which Hydra reads on the command line as texts."""
UNSET = "has no default; set it on the command line"
NAN = "is not a number; give a number"


def _text(value: Any) -> Any:
    return str(value) if isinstance(value, int | float) else value


Text = Annotated[str, BeforeValidator(_text)]
Count = Annotated[int, Field(ge=1), "must be at least 1"]
Natural = Annotated[int, Field(ge=0), "must be at least 0"]
Positive = Annotated[float, Field(gt=0), "must be above 0"]
NotNegative = Annotated[float, Field(ge=0), "must be 0 or more"]
Share = Annotated[float, Field(ge=0, le=1), "must lie in [0, 1]"]
PositiveShare = Annotated[float, Field(gt=0, le=1), "must lie in (0, 1]"]
SmallShare = Annotated[float, Field(ge=0, lt=1), "must lie in [0, 1)"]
"""A number and its range. A text that is added to one, as in Annotated[Share, "is a share of the rows"],
comes before "must …" in the remedy, and replaces it if it says what the number must be."""
Unbounded = Field(allow_inf_nan=True)
"""Marks a bound that no number may reach, so that it may be infinite."""
Dtype = Literal["float32", "bfloat16"]
ExportDtype = Literal[Dtype, "float16"]


@dataclasses.dataclass(frozen=True)
class Word:
    """How one writes that a setting has no value of its own. It is read as None; so is null, which a run's
    record has. YAML reads off, where it is not quoted, as false."""

    word: str

    def read(self, value: Any) -> Any:
        return None if value == self.word or (value is False and self.word == "off") else value

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> Any:
        return no_info_before_validator_function(self.read, handler(source))


Auto = Annotated[T | None, Word("auto")]
"""None: the program decides."""
All = Annotated[T | None, Word("all")]
"""None: no limit."""
Off = Annotated[T | None, Word("off")]
"""None: it is not done."""


def must(test: Callable[[Any], bool], says: str) -> AfterValidator:
    """Return what refuses a value for which ``test`` is false, with the remedy ``says``."""

    def checked(value: Any) -> Any:
        if not test(value):
            raise ValueError(says)
        return value

    return AfterValidator(checked)


def need(settings: Any, condition: bool, name: str, says: str) -> None:
    """Raise ConfigError about the setting ``name`` of the section ``settings``, with its value, unless
    ``condition``."""
    if not condition:
        value = getattr(settings, name)
        raise ConfigError(
            f"{place_of(settings)}{name}", word_of(type(settings), name) if value is None else value, says
        )


def yaml_defaults(*places: str, name: str | None = None) -> Callable[[type[T]], type[T]]:
    """Give the fields of a class the values that they have in config/, before ``dataclass`` reads them.

    ``places`` are files of config/, each with an optional section, for example ``config.yaml:rounds``. The
    first place that has a key gives its value, and the first place is also the section's name in messages,
    unless ``name`` is. A field stays without a default if no place has it or its value there is ``???``, and
    unchanged if it has one of its own. Fields that a base class leaves without a default are filled too.
    """

    def fill(cls: type[T]) -> type[T]:
        file, _, inner = places[0].partition(":")
        cls._place = name or ".".join(filter(None, (file.rpartition("/")[0], inner)))  # type: ignore[attr-defined]
        for base in cls.__mro__[1:]:
            hints = get_type_hints(base, include_extras=True) if is_dataclass(base) else {}
            for item in fields(base) if is_dataclass(base) else ():
                if item.default is item.default_factory:  # both are dataclasses.MISSING
                    cls.__annotations__.setdefault(item.name, hints[item.name])
        for key in cls.__annotations__:
            value = next((at[key] for at in map(section, places) if key in at), "???")
            if key not in vars(cls) and value != "???":
                copied = field(default_factory=partial(copy.deepcopy, value))
                setattr(cls, key, copied if isinstance(value, list | dict) else value)
        return cls

    return fill


def _checked(cls: type[T], frozen: bool = True) -> type[T]:
    """Make a section of ``cls``: a frozen dataclass whose fields are given by name and checked, also in
    ``dataclasses.replace``. Making one raises ConfigError, and so may its ``__post_init__``."""
    section: Any = pydantic_dataclass(cls, config=STRICT, frozen=frozen, kw_only=True)
    section.__get_pydantic_core_schema__ = classmethod(_from_mapping)
    checks = section.__init__

    @wraps(checks)
    def init(self: Any, **values: Any) -> None:
        _build(section)
        try:
            checks(self, **values)
        except ValidationError as error:
            raise config_error(error, section, place_of(section)) from error

    init.__pydantic_base_init__ = True  # type: ignore[attr-defined]  # within another section it is not called
    section.__init__ = init
    return cast(type[T], section)


def _build(section: Any) -> None:
    """Let pydantic read the annotations of a section. That takes a while, so it waits until the section is
    needed; it also brings another ``__init__``."""
    if not section.__pydantic_complete__:
        init = section.__init__
        rebuild_dataclass(section)
        section.__init__ = init


if TYPE_CHECKING:
    from dataclasses import dataclass
else:
    dataclass = _checked


def _from_mapping(cls: type, source: Any, handler: Callable[[Any], Any]) -> Any:
    """Return pydantic's schema of a section, which also takes a mapping of its settings; the settings
    themselves stay strict."""
    schema = inner = handler(source)
    while inner["type"] != "dataclass":
        inner = inner["schema"]
    inner["strict"] = False
    return schema


def nested(section_class: type[T]) -> T:
    """Return the default of a field that is itself a section: that section with all its defaults."""
    return cast(T, field(default_factory=section_class))


def typed(cfg: DictConfig | dict[str, Any], schema: type[T], prefix: str = "") -> T:
    """Return ``cfg`` as the section ``schema``. ``prefix`` is its place among all settings, for example
    ``reward.judge.``, and appears in messages.

    Raises ConfigError for an unknown key (with the nearest known one), a wrong type, a missing value, a value
    out of range or an impossible combination.
    """
    if not hasattr(schema, "__pydantic_validator__"):  # a plain dataclass of the user's
        checked = typed(cfg, _plain(cast(Any, schema)), prefix)
        return schema(**{item.name: getattr(checked, item.name) for item in fields(cast(Any, checked))})
    raw = cfg if isinstance(cfg, dict) else OmegaConf.to_container(cfg, resolve=True)
    scrub(raw, show=False)  # its secrets are removed from messages from now on
    _build(schema)
    try:
        section = schema.__pydantic_validator__.validate_python(_read(raw, prefix))  # type: ignore[attr-defined]
    except ValidationError as error:
        raise config_error(error, schema, prefix) from error
    return cast(T, section)


@cache
def _plain(schema: Any) -> Any:
    return _checked(schema, frozen=False)


def _read(tree: Any, key: str) -> Any:
    """Return the settings under ``key`` with YAML's infinities as numbers. Raises ConfigError for a value
    that is missing, and for NaN, because every comparison with it is false."""
    if isinstance(tree, dict):
        start = f"{key}." if key and not key.endswith(".") else key
        return {str(name): _read(item, f"{start}{name}") for name, item in tree.items()}
    if isinstance(tree, list):
        return [_read(item, f"{key}[{i}]") for i, item in enumerate(tree)]
    if tree == "???":
        raise ConfigError(key, tree, UNSET)
    if isinstance(tree, float) and math.isnan(tree):
        raise ConfigError(key, tree, NAN)
    return INFINITIES.get(tree, tree) if isinstance(tree, str) else tree


def config_error(error: ValidationError, schema: type, place: str) -> ConfigError:
    """Return the first of pydantic's refusals: unknown keys come first, missing ones last."""
    order = {"unexpected_keyword_argument": 0, "missing": 2}
    first = min(error.errors(include_url=False), key=lambda one: order.get(one["type"], 1))
    raised = first.get("ctx", {}).get("error")
    if isinstance(raised, ConfigError):
        return raised
    key = place.rstrip(".")
    for part in first["loc"]:
        key += f"[{part}]" if isinstance(part, int) else f".{part}" if key else str(part)
    if first["type"] == "missing":
        return ConfigError(key, "???", UNSET)
    value, limits = first["input"], first.get("ctx", {}).values()
    value = float(value) if any(isinstance(limit, float) for limit in limits) else value  # 0 is 0.0 there
    return ConfigError(key, value, str(raised) if raised else _remedy(first, key, schema, place))


def _remedy(error: Any, key: str, schema: Any, place: str) -> str:
    """Return what to do about a refusal of the setting ``key``."""
    kind, value = error["type"], error["input"]
    start = f"{place.rstrip('.')}.".lstrip(".")
    section, name = _holder(schema, [part for part in error["loc"] if isinstance(part, str)])
    if kind == "unexpected_keyword_argument":
        message = remedy(key, str(value), names(schema, start))
        return message + (
            f"; known here: {', '.join(sorted(type_hints(section)))}" if message == NOTHING else ""
        )
    if kind == "dataclass_type":
        listed = f"is one of {name}: a mapping, as in {{name: hh, weight: 0.7}}"
        inside = list(names(schema, start))
        switch = f"; type {key}.enabled={str(value).lower()}" if f"{key}.enabled" in inside else ""
        alone = f"is a section, not a setting{switch}; {section_says(key, inside)}"
        return listed if isinstance(error["loc"][-1], int) else alone
    return _remedy_of_value(kind, value, key, section, name)


def _remedy_of_value(kind: str, value: Any, key: str, section: Any, name: str) -> str:
    """Return what a value must be that the setting ``name`` of ``section`` does not take."""
    parts = list(_parts(type_hints(section, extras=True)[name]))
    word = word_of(section, name)
    blank = word or ("null" if NoneType in parts else None)
    *base, message = ["", *(part for part in parts if isinstance(part, str))]
    if kind.startswith(("greater", "less")):
        limit = message if "must " in message else f"{message}: {base[-1]}"
        return f"{limit}, or {blank}" if blank and f"or {blank}" not in limit else limit
    if kind == "literal_error":
        choices = (choice for part in parts if get_origin(part) is Literal for choice in get_args(part))
        return f"use one of {', '.join(map(str, [*filter(None, [blank]), *choices]))}"
    if kind == "finite_number":
        return NAN if math.isnan(value) else message if "finite" in message else "must be finite"
    if kind == "dict_type":
        return f"is a mapping{message or f': give its settings, as in {key}.name=value'}"
    return _must_be(kind, value, key, getattr(section, name, None), int in parts, word)


def _must_be(kind: str, value: Any, key: str, default: Any, of_numbers: bool, word: str | None) -> str:
    """Return of what type the value of ``key`` must be, with an example."""
    whole = isinstance(value, float) and value.is_integer()
    number = str(int(value) if whole else default if isinstance(default, int | float) else 1)
    texts = "[0,1]" if of_numbers else "[a,b]"
    takes, example = {
        "bool": ("true or false", "true"),
        "int": ("a whole number", number),
        "float": ("a number", number),
        "list": ("a list", texts),
    }.get(kind.split("_")[0], ("a text", ""))
    quoted = "is a text: " if isinstance(value, str) and re.fullmatch(r"[-+.\deE]*\d", value) else ""
    example = f", as in {key}={example}" if example else ""
    return f"{quoted}must be {takes}{example}{f', or {word}' if word else ''}"


def without_words(tree: Mapping[str, Any], schema: Any) -> dict[str, Any]:
    """Return settings of ``schema`` with None in place of each word that is read so."""
    out, hints = dict(tree), type_hints(schema, extras=True)
    for name in tree.keys() & hints.keys():
        for part in _parts(hints[name]):
            if isinstance(part, Word):
                out[name] = part.read(tree[name])
            elif isinstance(part, type) and is_dataclass(part) and isinstance(tree[name], dict):
                out[name] = without_words(tree[name], part)
    return out


def word_of(schema: Any, key: str) -> str | None:
    """Return the word of the setting ``key``; None if it has none, or is no setting of ``schema``."""
    try:
        section, name = _holder(schema, key.split("."))
        hint = type_hints(section, extras=True)[name]
    except KeyError:
        return None
    return next((part.word for part in _parts(hint) if isinstance(part, Word)), None)


def _holder(schema: Any, path: list[str]) -> tuple[Any, str]:
    """Return the section of the setting at ``path`` within ``schema``, and the setting's own name, which may
    be a mapping that has the rest of the path."""
    for name in path[:-1]:
        inner = next((part for part in _parts(type_hints(schema)[name]) if is_dataclass(part)), None)
        if inner is None:
            return schema, name
        schema = inner
    return schema, path[-1]


def _parts(hint: Any) -> Iterator[Any]:
    """Yield a type hint and everything in it: types, annotations and choices."""
    yield hint
    if get_origin(hint) is not Literal:
        for part in (
            (hint.__origin__, *hint.__metadata__) if hasattr(hint, "__metadata__") else get_args(hint)
        ):
            yield from _parts(part)


def place_of(settings: Any) -> str:
    """Return the place of a section among all settings, with a full stop behind it; "" for all of them."""
    place: str = getattr(settings, "_place", "")
    return f"{place}." if place else ""
