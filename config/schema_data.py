"""Settings of the data: where groups come from and which of them are kept."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator

from common.errors import require
from config.files import of_project
from config.sections import (
    All,
    NotNegative,
    Positive,
    Share,
    SmallShare,
    Text,
    dataclass,
    must,
    yaml_defaults,
)

OfProject = Annotated[Text, AfterValidator(of_project)]
RANGE = (
    "give two shares of the groups, from the least likely on, as in [0.25, 1]: 0 <= low < high <= 1; or all"
)
"""What data.logprob_range takes."""


def _is_range(ends: list[float]) -> bool:
    return len(ends) == 2 and 0 <= ends[0] < ends[1] <= 1


Kept = Annotated[Share, "is a share of the examples"]


@dataclass
class MixPart:
    """One set of ``data=mix``: a file of config/data, its weight, and optionally another path to read it
    from."""

    name: Text
    weight: Positive = 1.0
    path: Text | None = None
    eval_path: Text | None = None


@dataclass
@yaml_defaults("data/_base.yaml")
class DataConfig:
    """Where groups come from. ``source`` is the import path of a function ``f(config, split) ->
    data.sources.Loaded``."""

    name: Text
    source: Text
    path: OfProject | None
    eval_path: OfProject | None
    revision: Text | None
    subset: Text | None
    data_dir: Text | None
    split: Text
    eval_split: Text | None
    eval_fraction: Annotated[SmallShare, "is the share of the prompts held out for evaluation"]
    format: Text
    columns: (
        Annotated[
            dict[str, Text],
            "; in quotes, as in 'data.columns={prompt: question, chosen: good, rejected: bad}'",
        ]
        | None
    )
    ignore_columns: list[Text] | None
    numbers: list[Text] | None
    max_unreadable: Annotated[Share, "is a share of the rows"]
    one_label: bool
    system_prompt: Text | None
    control_tokens: Literal["keep", "escape", "drop"]
    long_prompts: Literal["cut", "drop"]
    apply_chat_template: bool
    score_threshold: NotNegative
    verifier: Text | None
    frac_unique_desirable: Kept
    frac_unique_undesirable: Kept
    logprob_range: All[Annotated[list[float], must(_is_range, RANGE)]]
    mix: list[MixPart] | None

    def __post_init__(self) -> None:
        mixes = self.source == "data.mix.mixed"
        example = "name the sets, as in 'data.mix=[{name: hh, weight: 0.7}, {name: shp, weight: 0.3}]'"
        require(bool(self.mix) == mixes, "data.mix", self.mix, example if mixes else "is for data=mix")
