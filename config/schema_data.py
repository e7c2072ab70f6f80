"""Settings of the data: where groups come from and which of them are kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from common.errors import one_of, require
from config.defaults import yaml_defaults
from config.files import of_project
from config.schema_instruct import StoriesConfig


@dataclass
class MixPart:
    """One set of ``data=mix``: a file of config/data, its weight, and optionally another path to read it
    from."""

    name: str = "???"
    weight: float = 1.0
    path: str | None = None
    eval_path: str | None = None

    def __post_init__(self) -> None:
        require(self.weight > 0, "data.mix.weight", self.weight, f"of {self.name} must be above 0")


@dataclass
@yaml_defaults("data/_base.yaml")
class DataConfig:
    """Where groups come from. ``source`` is the import path of a function ``f(config, split) ->
    data.sources.Loaded``."""

    name: str
    source: str
    path: str | None
    eval_path: str | None
    revision: str | None
    subset: str | None
    data_dir: str | None
    split: str
    eval_split: str | None
    eval_fraction: float
    format: str
    columns: dict[str, str] | None
    ignore_columns: list[str] | None
    numbers: list[str] | None
    max_unreadable: float
    one_label: bool
    system_prompt: str | None
    control_tokens: str
    long_prompts: str
    apply_chat_template: bool
    score_threshold: float
    verifier: str | None
    frac_unique_desirable: float
    frac_unique_undesirable: float
    logprob_range: list[float] | None
    mix: list[MixPart] | None
    instruct: StoriesConfig | None

    def __post_init__(self) -> None:
        self.path, self.eval_path = of_project(self.path), of_project(self.eval_path)
        if isinstance(self.instruct, Mapping):  # from a file of config/data read as plain data
            self.instruct = StoriesConfig(**self.instruct)
        require(
            (self.instruct is None) or self.source.startswith("data.instruct."),
            "data.instruct",
            self.name,
            "is for data=instruct",
        )
        shares = {
            "frac_unique_desirable": "examples",
            "frac_unique_undesirable": "examples",
            "max_unreadable": "rows",
        }
        for key, of in shares.items():
            require(
                0 <= getattr(self, key) <= 1,
                f"data.{key}",
                getattr(self, key),
                f"is a share of the {of}: must lie in [0, 1]",
            )
        mixes = self.source == "data.mix.mixed"
        require(
            bool(self.mix) == mixes,
            "data.mix",
            self.mix,
            "name the sets, as in 'data.mix=[{name: hh, weight: 0.7}, {name: shp, weight: 0.3}]'"
            if mixes
            else "is for data=mix",
        )
        one_of("data.control_tokens", self.control_tokens, ("keep", "escape", "drop"))
        one_of("data.long_prompts", self.long_prompts, ("cut", "drop"))
        require(self.score_threshold >= 0, "data.score_threshold", self.score_threshold, "must be 0 or more")
        ends = self.logprob_range
        require(
            ends is None or (len(ends) == 2 and 0 <= ends[0] < ends[1] <= 1),
            "data.logprob_range",
            ends,
            "give two shares of the groups, from the least likely on, as in [0.25, 1]: 0 <= low < high <= "
            "1; null keeps all",
        )
        require(
            0 <= self.eval_fraction < 1,
            "data.eval_fraction",
            self.eval_fraction,
            "is the share of the prompts held out for evaluation: must lie in [0, 1)",
        )
