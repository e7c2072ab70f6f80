"""Settings of the embedded stories, ``data=instruct``, and of the judges that score them."""

from __future__ import annotations

from typing import Annotated

from config.typed import Count, NotNegative, Share, Text, dataclass, must, need, yaml_defaults

AUTHORS = "name two authors of the language or more, each once, as in [fine, quick, sloppy, base]"
Noise = Annotated[NotNegative, "is the standard deviation of a judge's error, in points of the reward"]


@dataclass
@yaml_defaults("data/instruct.yaml:instruct")
class StoriesConfig:
    """Who wrote the offline data, and how the judge that labelled them errs."""

    language: Text
    authors: Annotated[list[Text], must(lambda names: len(names) == len(set(names)) >= 2, AUTHORS)]
    prompts: Count
    noise: Noise
    length_bias: float
    own: Text | None
    own_share: Annotated[Share, "is a share of the prompts"]

    def __post_init__(self) -> None:
        need(
            self,
            self.own is not None or self.own_share == 0,
            "own",
            "name the groups file of the model's own answers (sample.py, then label.py), of which "
            f"data.instruct.own_share={self.own_share:g} of the prompts are to be",
        )
        unread = (
            f"nothing would read data.instruct.own={self.own}: give a share above 0, or leave the file out"
        )
        need(self, self.own is None or self.own_share > 0, "own_share", unread)


@dataclass
@yaml_defaults("reward/instruct.yaml:instruct")
class StoryJudgeConfig:
    """The true reward of a story, and how this judge errs."""

    language: Text
    noise: Noise
    length_bias: float
