"""The settings of one stage of a round on its own: what ``sample.py`` and ``label.py`` read beside those of a
run. Their yaml files say what each key means."""

from __future__ import annotations

from dataclasses import dataclass, field

from common.errors import one_of, require
from config.defaults import yaml_defaults


@dataclass
@yaml_defaults("sample.yaml")
class SampleStage:
    """``sample.py``: ``rounds.samples`` answers to each prompt of the data, by ``model`` and ``sampler``."""

    out: str
    format: str
    split: str
    limit: int | None
    overwrite_out: bool

    def __post_init__(self) -> None:
        one_of("format", self.format, ("groups", "alpacaeval", "halos"))
        one_of("split", self.split, ("train", "eval"))
        _check_suffix(self.out, self.format)
        require(self.limit is None or self.limit >= 1, "limit", self.limit, "must be at least 1, or null")


@dataclass
@yaml_defaults("label.yaml")
class LabelStage:
    """``label.py``: scores of the samples in a file, by ``reward``, and the feedback made of them, by
    ``rounds``."""

    out: str
    format: str
    overwrite_out: bool
    samples: str = field(default="???", metadata={"key": "in"})  # a field of Python cannot be called "in"

    def __post_init__(self) -> None:
        one_of("format", self.format, ("groups", "binary", "pairwise", "scalar"))
        _check_suffix(self.out, self.format)


def _check_suffix(out: str, form: str) -> None:
    """Readers tell lines of JSON from one list by the file's name."""
    suffix = ".jsonl" if form == "groups" else ".json"
    require(out.endswith(suffix), "out", out, f"with format={form} the file's name must end with {suffix}")
