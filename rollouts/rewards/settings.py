"""Settings of the rewards that come with the project, a class for the section of each kind in its yaml of
config/reward. A reward's ``_target_`` names the class by the annotation of its first parameter."""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Literal

from common.errors import ConfigError, require
from common.secrets import scrub
from config.files import group_file
from config.schema_rewards import OWN_KEYS, RewardConfig
from config.sections import (
    Auto,
    Count,
    Dtype,
    Natural,
    NotNegative,
    Off,
    Positive,
    PositiveShare,
    Text,
    dataclass,
    must,
    need,
    place_of,
    yaml_defaults,
)

Weight = Annotated[NotNegative, "is a weight"]
Seconds = Annotated[Positive, "is seconds a call may take"]


def _groups(pattern: str) -> int:
    try:
        return re.compile(pattern).groups
    except re.error:
        return -1


def address(what: str) -> Any:
    """Return what refuses a text that starts neither with http:// nor with https://."""
    starts = ("http://", "https://")
    return must(lambda url: url.startswith(starts), f"is where {what}: must start with http:// or https://")


@dataclass
@yaml_defaults("reward/function.yaml:function")
class FunctionConfig:
    """A Python function with TRL's signature. It runs in worker processes, which are killed when they take
    too long."""

    path: Annotated[
        Text, must(lambda path: "." in path.strip("."), "is an import path: write it as module.function")
    ]
    batch_size: Count
    workers: Count
    timeout: Annotated[Positive, "is seconds a batch may take"]
    conversational: Auto[bool]


@dataclass
@yaml_defaults("reward/constraints.yaml:constraints")
class ConstraintsConfig:
    """A reward for constraints that a program checks, times a guard of fluency."""

    points: Positive
    enough: Annotated[PositiveShare, "is a share"]


@dataclass
@yaml_defaults("reward/verifier.yaml:verifier")
class VerifierConfig:
    """A reward for answers that can be checked: the weights of its three parts (paper, Table 2) and the
    limits of a check."""

    accuracy: Weight
    format: Weight
    tag_count: Weight
    workers: Count
    timeout: Annotated[Positive, "is seconds a completion may take"]

    def __post_init__(self) -> None:
        weights = self.accuracy + self.format + self.tag_count
        need(self, weights > 0, "accuracy", "all three weights are 0: give one a weight")


@dataclass
@yaml_defaults("reward/classifier.yaml:classifier", name="reward.armorm")
class RewardModelConfig:
    """Settings that every reward model needs: weights, lengths in its own tokens, and the number of tokens in
    one forward pass."""

    name_or_path: Text
    revision: Text | None
    dtype: Dtype
    max_length: int
    max_prompt_length: int
    batch_tokens: Count

    def __post_init__(self) -> None:
        no_room = f"must be at least 1, and less than {place_of(self)}max_length={self.max_length}"
        need(self, 1 <= self.max_prompt_length < self.max_length, "max_prompt_length", no_room)

    @property
    def loads_model(self) -> bool:
        """Whether the run itself loads the model."""
        return True


@dataclass
@yaml_defaults("reward/classifier.yaml:classifier")
class ClassifierConfig(RewardModelConfig):
    """A sequence classifier with one label. ``rendering`` says where the scored text ends."""

    rendering: Literal["template", "turn"]


@dataclass
class EndpointConfig:
    """Settings of an endpoint that is called over HTTP, beside its address. ``timeout`` and ``backoff`` are
    in seconds."""

    api_key_env: Off[Text]
    concurrency: Count
    timeout: Seconds
    retries: Natural
    backoff: Annotated[Positive, "is seconds before the first retry"]

    def __post_init__(self) -> None:
        there = self.api_key_env is None or self.api_key_env in os.environ
        variable = "is the environment variable that holds the key (not the key itself): set it, or use off"
        need(self, there, "api_key_env", variable)
        scrub(os.environ.get(self.api_key_env or ""), "api_key")


@dataclass
@yaml_defaults("reward/judge.yaml:judge")
class JudgeConfig(EndpointConfig):
    """A language model behind an OpenAI-compatible endpoint that is asked for a score."""

    model: Text
    pattern: Annotated[
        Text,
        must(
            lambda pattern: _groups(pattern) == 1, "must be a regular expression with one group, the number"
        ),
    ]
    min_score: float
    max_score: float
    temperature: NotNegative
    max_tokens: Count
    max_tokens_field: Text
    max_calls: Count
    max_total_tokens: Count
    base_url: Annotated[Text, address("/chat/completions is found")]
    system: Text | None
    prompt: Text

    def __post_init__(self) -> None:
        super().__post_init__()
        parts = "must contain {completion}, and may contain {prompt} and {reference}"
        require("{completion}" in self.prompt, "reward.judge.prompt", "…", parts)
        below = f"must be below reward.judge.max_score={self.max_score}"
        need(self, self.min_score < self.max_score, "min_score", below)


@dataclass
@yaml_defaults("reward/http.yaml:http")
class HttpConfig(EndpointConfig):
    """A reward server of the user's own that returns scores."""

    base_url: Annotated[Text, address("the reward server is asked")]
    batch_size: Count
    conversational: bool


KEY = "reward.weighted.parts"


@dataclasses.dataclass(frozen=True)
class Part:
    """One reward of the sum, and the factor by which its scores are multiplied."""

    weight: float
    reward: RewardConfig


@dataclass
@yaml_defaults("reward/weighted.yaml:weighted")
class WeightedConfig:
    """``parts`` maps a name to the weight, the file of config/reward, and settings of that reward's
    section."""

    parts: dict[str, Any]
    normalize: Literal["none", "group"]

    def __post_init__(self) -> None:
        example = "give rewards with weights: {verifier: {weight: 1}, function: {weight: 0.2, path: m.f}}"
        require(bool(self.parts), KEY, self.parts, example)
        for name, settings in self.parts.items():
            sound = isinstance(name, str) and re.fullmatch(r"[A-Za-z0-9_]+", name) is not None
            require(sound, KEY, name, "a name is of letters, digits and underscores")
            require(isinstance(settings, dict), f"{KEY}.{name}", settings, example)
        self.typed()

    @property
    def needs_reference(self) -> bool:
        """Whether any part compares with the prompt's reference answer."""
        return any(part.reward.needs_reference for part in self.typed().values())

    def models_alone(self) -> WeightedConfig | None:
        """Return the parts that load a model in the run's own processes; None if there are none."""
        parts = {
            name: self.parts[name]
            for name, part in self.typed().items()
            if part.reward.models_alone() is not None
        }
        return WeightedConfig(parts=parts, normalize=self.normalize) if parts else None

    def typed(self) -> dict[str, Part]:
        """Return each part by its name, with its reward's settings typed. Raises ConfigError."""
        return {name: self._part(name, dict(settings)) for name, settings in self.parts.items()}

    @contextmanager
    def of_part(self, name: str) -> Iterator[None]:
        """Re-raise a ConfigError of the block with the setting's name as it is written here, below
        ``parts``."""
        try:
            yield
        except ConfigError as error:
            of_reward = error.key.startswith("reward.")
            key = error.key.rpartition(".")[2]
            remedy = error.remedy if of_reward else f"{error.key}: {error.remedy}"
            raise ConfigError(f"{KEY}.{name}.{key}", error.value, remedy) from error

    def _part(self, name: str, settings: dict[str, Any]) -> Part:
        weight, kind = settings.pop("weight", None), settings.pop("reward", name)
        number = isinstance(weight, int | float) and not isinstance(weight, bool)
        require(
            number and math.isfinite(weight) and weight != 0,
            f"{KEY}.{name}.weight",
            weight,
            "is what its scores are multiplied with: a number that is not 0",
        )
        key = f"{KEY}.{name}.reward"
        require(kind != "weighted", key, kind, "is this reward itself: name its parts here")
        tree = group_file("reward", key, str(kind))
        section = next(tree_key for tree_key in tree if tree_key not in OWN_KEYS)
        with self.of_part(name):
            return Part(float(weight), RewardConfig.from_tree(tree | {section: tree[section] | settings}))
