"""Settings of a reward: the keys of its yaml, and a dataclass for the section of each kind that comes with
the project."""

from __future__ import annotations

import dataclasses
import os
import re
from dataclasses import asdict, fields, is_dataclass, replace
from typing import Annotated, Any, Literal, Protocol, runtime_checkable

from common.errors import require
from common.imports import import_function, written_type
from common.secrets import remember
from config.files import section
from config.sections import (
    Auto,
    Count,
    Dtype,
    Natural,
    NotNegative,
    Off,
    Positive,
    PositiveShare,
    Share,
    Text,
    dataclass,
    must,
    need,
    place_of,
    typed,
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
        need(
            self,
            1 <= self.max_prompt_length < self.max_length,
            "max_prompt_length",
            f"must be at least 1 and less than {place_of(self)}max_length={self.max_length}, or no room is "
            "left for a completion",
        )

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
        need(
            self,
            self.api_key_env is None or self.api_key_env in os.environ,
            "api_key_env",
            "is the name of the environment variable that holds the endpoint's key (never the key itself), "
            "and is not set; set that variable, or give off for no key",
        )
        remember(os.environ.get(self.api_key_env or ""), "api_key")


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
    max_calls: Count
    max_total_tokens: Count
    base_url: Annotated[Text, address("/chat/completions is found")]
    system: Text | None
    prompt: Text

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            "{completion}" in self.prompt,
            "reward.judge.prompt",
            "…",
            "must contain {completion}, and may contain {prompt} and {reference}",
        )
        below = f"must be below reward.judge.max_score={self.max_score}"
        need(self, self.min_score < self.max_score, "min_score", below)


@dataclass
@yaml_defaults("reward/http.yaml:http")
class HttpConfig(EndpointConfig):
    """A reward server of the user's own that returns scores."""

    base_url: Annotated[Text, address("the reward server is asked")]
    batch_size: Count
    conversational: bool


@dataclass
class _Keys:
    """The keys of a reward's yaml other than the section of its kind."""

    name: Text
    max_missing: Annotated[Share, "is the share of completions that may go without a verdict"]
    _target_: Text = dataclasses.field()
    needs_reference: bool = False


OWN_KEYS = tuple(item.name for item in fields(_Keys))


@dataclasses.dataclass(frozen=True)
class RewardConfig:
    """A reward as its yaml describes it: the import path of what makes it, and the settings of its kind,
    typed."""

    name: str
    max_missing: float
    needs_reference: bool
    target: str
    kind: str
    settings: Any

    @classmethod
    def from_tree(cls, tree: dict[str, Any]) -> RewardConfig:
        """Return the reward that the keys of a yaml describe. In addition to the keys below, the yaml has one
        section, whose name is the reward's kind. Raises ConfigError."""
        own = typed({key: tree[key] for key in OWN_KEYS if key in tree}, _Keys, "reward.")
        kinds = [key for key in tree if key not in OWN_KEYS]
        require(
            len(kinds) == 1 and isinstance(tree[kinds[0]], dict),
            "reward",
            " and ".join(map(str, kinds)) or None,
            "has exactly one section, the settings of its kind: choose a file of config/reward",
        )
        typing = written_type(own._target_)
        says = "must be a function whose first parameter is annotated with the dataclass of its settings"
        require(typing is not None, "reward._target_", own._target_, says)
        schema = import_function("reward._target_", str(typing))
        require(is_dataclass(schema), "reward._target_", own._target_, says)
        settings = typed(tree[kinds[0]], schema, f"reward.{kinds[0]}.")
        needs = own.needs_reference or _compares(settings)
        return cls(own.name, own.max_missing, needs, own._target_, kinds[0], settings)

    @classmethod
    def of_kind(cls, kind: str, settings: Any, max_missing: float | None = None) -> RewardConfig:
        """Return the reward of config/reward/<kind>.yaml with other settings, for code that already has the
        settings."""
        tree = section(f"reward/{kind}.yaml")
        share = float(tree["max_missing"]) if max_missing is None else max_missing
        needs = bool(tree.get("needs_reference")) or _compares(settings)
        return cls(kind, share, needs, str(tree["_target_"]), kind, settings)

    @property
    def needs_every_reference(self) -> bool:
        """Whether a prompt without a reference answer gets no verdict, as the reward's yaml says of its kind.
        A function, and a sum of rewards, may score one all the same."""
        return self.needs_reference and not _compares(self.settings)

    def models_alone(self) -> RewardConfig | None:
        """Return this reward with only the parts that load a model in the run's own processes; None if no
        part does."""
        if isinstance(self.settings, HasParts):
            settings = self.settings.models_alone()
            return None if settings is None else replace(self, settings=settings)
        return self if getattr(self.settings, "loads_model", False) else None


@runtime_checkable
class HasParts(Protocol):
    """Settings of a reward that consists of other rewards."""

    def models_alone(self) -> Any: ...


def _compares(settings: Any) -> bool:
    """Return whether the settings of a kind say that the reward compares with reference answers."""
    return bool(getattr(settings, "needs_reference", False))


def completed(tree: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of a reward's yaml, checked, with every default of its kind filled in. Raises
    ConfigError."""
    config = RewardConfig.from_tree(tree)
    return {key: tree[key] for key in OWN_KEYS if key in tree} | {config.kind: asdict(config.settings)}
