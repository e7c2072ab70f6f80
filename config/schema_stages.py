"""Settings that ``sample.py`` and ``label.py`` read in addition to those of a run, each for one stage of a
round on its own. Their yaml files say what each key means."""

from __future__ import annotations

from dataclasses import dataclass, field

from common.errors import one_of, require
from config.defaults import yaml_defaults


@dataclass
@yaml_defaults("sample.yaml")
class SampleStage:
    """``sample.py``: ``rounds.samples`` answers to each prompt of the data, sampled from ``model`` by
    ``sampler``."""

    run: str | None
    out: str
    format: str
    split: str
    skip: int
    limit: int | None
    overwrite_out: bool

    def __post_init__(self) -> None:
        one_of("format", self.format, ("groups", "alpacaeval", "halos"))
        one_of("split", self.split, ("train", "eval"))
        _check_suffix(self.out, self.format)
        require(self.skip >= 0, "skip", self.skip, "must be 0 or more")
        require(self.limit is None or self.limit >= 1, "limit", self.limit, "must be at least 1, or null")


@dataclass
@yaml_defaults("label.yaml")
class LabelStage:
    """``label.py``: scores by ``reward`` of the samples in a file, and the feedback made from them according
    to ``rounds``."""

    out: str
    format: str
    overwrite_out: bool
    samples: str = field(default="???", metadata={"key": "in"})  # "in" is a Python keyword

    def __post_init__(self) -> None:
        one_of("format", self.format, ("groups", "binary", "pairwise", "scalar"))
        _check_suffix(self.out, self.format)


def _check_suffix(out: str, form: str) -> None:
    """Raise ConfigError unless the name ``out`` has the suffix of the format. Readers tell JSON lines from a
    single JSON list by the file's name."""
    suffix = ".jsonl" if form == "groups" else ".json"
    require(out.endswith(suffix), "out", out, f"with format={form} the file's name must end with {suffix}")
