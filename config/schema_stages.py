"""The settings of one stage of a round on its own, beside all those of a run: which files ``sample.py`` and ``label.py`` read and
write. On the command line they stand like any other setting: ``python sample.py model=… data=… out=samples.jsonl``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, TypeVar

from common.errors import ConfigError, one_of, require

T = TypeVar("T")


@dataclass
class SampleStage:
    """``sample.py``: ``rounds.samples`` answers to each prompt of the data, by ``model`` and ``sampler``."""

    out: str
    """the file to write"""
    format: str = "groups"
    """groups: JSON lines with token ids; alpacaeval: a JSON list of instruction, output, generator; halos: HALOs' samples"""
    split: str = "train"
    """the part of the data whose prompts are taken: train or eval"""
    limit: int | None = None
    """at most this many prompts, the first of the data"""
    overwrite_out: bool = False
    """write over a file that is there"""

    def __post_init__(self) -> None:
        one_of("format", self.format, ("groups", "alpacaeval", "halos"))
        one_of("split", self.split, ("train", "eval"))
        _check_suffix(self.out, self.format)
        require(self.limit is None or self.limit >= 1, "limit", self.limit, "must be at least 1, or null")


@dataclass
class LabelStage:
    """``label.py``: scores of the samples in a file, by ``reward``, and the feedback made of them, by ``rounds``."""

    samples: str = field(metadata={"key": "in"})
    """the samples: what ``sample.py`` writes in any format, or HALOs' samples"""
    out: str
    """the file to write"""
    format: str = "groups"
    """groups: a groups file; binary, pairwise, scalar: HALOs' feedback of that type"""
    overwrite_out: bool = False
    """write over a file that is there"""

    def __post_init__(self) -> None:
        one_of("format", self.format, ("groups", "binary", "pairwise", "scalar"))
        _check_suffix(self.out, self.format)


def _check_suffix(out: str, form: str) -> None:
    """Readers tell lines of JSON from one list by the file's name."""
    suffix = ".jsonl" if form == "groups" else ".json"
    require(out.endswith(suffix), "out", out, f"with format={form} the file's name must end with {suffix}")


def plus(arguments: list[str], stage: type[Any]) -> list[str]:
    """Command-line arguments with a ``+`` before the stage's own settings, which are not in config/config.yaml."""
    own = tuple(f"{key_of(item)}=" for item in fields(stage))
    return [f"+{argument}" if argument.startswith(own) else argument for argument in arguments]


def stage_settings(take: Callable[[str], Any], stage: type[T]) -> T:
    """The stage's settings, each taken out of what Hydra composed by ``take(key)`` (None where it is not given). Raises ConfigError."""
    values: dict[str, Any] = {}
    for item in fields(stage):  # type: ignore[arg-type]
        value = take(key_of(item))
        if value is None and item.default is MISSING:
            raise ConfigError(key_of(item), None, "give the file, as in " + key_of(item) + "=samples.jsonl")
        if value is not None:
            values[item.name] = value
    return stage(**values)


def key_of(item: Any) -> str:
    """How a field is called on the command line: ``in`` cannot be a name in Python."""
    return str(item.metadata.get("key", item.name))
