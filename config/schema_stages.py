"""Settings that ``sample.py`` and ``label.py`` read in addition to those of a run, each for one stage of a
round on its own. Their yaml files say what each key means."""

from __future__ import annotations

from dataclasses import field
from typing import Literal

from config.sections import All, Count, Natural, Text, dataclass, need, yaml_defaults


@dataclass
@yaml_defaults("sample.yaml")
class SampleStage:
    """``sample.py``: ``rounds.samples`` answers to each prompt of the data, sampled from ``model`` by
    ``sampler``."""

    run: Text | None
    out: Text
    format: Literal["groups", "alpacaeval", "halos"]
    split: Literal["train", "eval"]
    skip: Natural
    limit: All[Count]
    overwrite_out: bool

    def __post_init__(self) -> None:
        _check_suffix(self)


@dataclass
@yaml_defaults("label.yaml")
class LabelStage:
    """``label.py``: scores by ``reward`` of the samples in a file, and the feedback made from them according
    to ``rounds``."""

    out: Text
    format: Literal["groups", "binary", "pairwise", "scalar"]
    overwrite_out: bool
    samples: Text = field(metadata={"key": "in"})  # "in" is a Python keyword

    def __post_init__(self) -> None:
        _check_suffix(self)


def _check_suffix(stage: SampleStage | LabelStage) -> None:
    """Raise ConfigError unless the file's name has the suffix of the format. Readers tell JSON lines from a
    single JSON list by it."""
    suffix = ".jsonl" if stage.format == "groups" else ".json"
    said = f"with format={stage.format} the file's name must end with {suffix}"
    need(stage, stage.out.endswith(suffix), "out", said)
