"""Settings of the embedded stories, ``data=instruct``, and of the judges that score them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from common.errors import require
from config.defaults import yaml_defaults


@dataclass
@yaml_defaults("data/instruct.yaml:instruct")
class StoriesConfig:
    """Who wrote the offline data, and how the judge that labelled them errs."""

    language: str
    authors: list[str]
    prompts: int
    noise: float
    length_bias: float
    own: str | None
    own_share: float

    def __post_init__(self) -> None:
        require(
            len(self.authors) >= 2 and len(set(self.authors)) == len(self.authors),
            "data.instruct.authors",
            self.authors,
            "name two authors of the language or more, each once, as in [fine, quick, sloppy, base]",
        )
        require(self.prompts >= 1, "data.instruct.prompts", self.prompts, "must be at least 1")
        check_judge("data.instruct", self.noise, self.length_bias)
        require(
            0 <= self.own_share <= 1,
            "data.instruct.own_share",
            self.own_share,
            "is a share of the prompts: must lie in [0, 1]",
        )
        require(
            self.own is not None or self.own_share == 0,
            "data.instruct.own",
            self.own,
            "name the groups file of the model's own answers (sample.py, then label.py), of which "
            f"data.instruct.own_share={self.own_share:g} of the prompts are to be",
        )
        require(
            self.own is None or self.own_share > 0,
            "data.instruct.own_share",
            self.own_share,
            f"nothing would read data.instruct.own={self.own}: give a share above 0, or leave the file out",
        )


@dataclass
@yaml_defaults("reward/instruct.yaml:instruct")
class StoryJudgeConfig:
    """The true reward of a story, and how this judge errs."""

    language: str
    noise: float
    length_bias: float

    def __post_init__(self) -> None:
        check_judge("reward.instruct", self.noise, self.length_bias)


def check_judge(section: str, noise: float, length_bias: float) -> None:
    """Raise ConfigError unless ``noise`` and ``length_bias`` are valid for a judge."""
    require(
        0 <= noise < math.inf,
        f"{section}.noise",
        noise,
        "is the standard deviation of a judge's error, in points of the reward: must be 0 or more",
    )
    require(
        math.isfinite(length_bias),
        f"{section}.length_bias",
        length_bias,
        "is points that a word adds: must be a finite number",
    )
