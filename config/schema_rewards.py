"""Settings of a reward: the keys of its yaml, and a dataclass for the section of each kind that comes with
the project."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, is_dataclass, replace
from typing import Any, Protocol, runtime_checkable

from common.errors import one_of, require
from common.imports import import_function
from config.defaults import section, yaml_defaults
from config.schema_endpoint import EndpointConfig, check_address


@dataclass
@yaml_defaults("reward/function.yaml:function")
class FunctionConfig:
    """A Python function with TRL's signature. It runs in worker processes, which are killed when they take
    too long."""

    path: str
    batch_size: int
    workers: int
    timeout: float
    conversational: bool | None

    def __post_init__(self) -> None:
        require(
            "." in self.path.strip("."),
            "reward.function.path",
            self.path,
            "is an import path: write it as module.function",
        )
        _at_least("reward.function", self, batch_size=1, workers=1)
        require(
            self.timeout > 0,
            "reward.function.timeout",
            self.timeout,
            "is seconds a batch may take: must be above 0",
        )


@dataclass
@yaml_defaults("reward/constraints.yaml:constraints")
class ConstraintsConfig:
    """A reward for constraints that a program checks, times a guard of fluency."""

    points: float
    enough: float

    def __post_init__(self) -> None:
        require(self.points > 0, "reward.constraints.points", self.points, "must be above 0")
        require(
            0 < self.enough <= 1, "reward.constraints.enough", self.enough, "is a share: must lie in (0, 1]"
        )


@dataclass
@yaml_defaults("reward/verifier.yaml:verifier")
class VerifierConfig:
    """A reward for answers that can be checked: the weights of its three parts (paper, Table 2) and the
    limits of a check."""

    accuracy: float
    format: float
    tag_count: float
    workers: int
    timeout: float

    def __post_init__(self) -> None:
        for key in ("accuracy", "format", "tag_count"):
            require(
                getattr(self, key) >= 0,
                f"reward.verifier.{key}",
                getattr(self, key),
                "is a weight: must be 0 or more",
            )
        require(
            self.accuracy + self.format + self.tag_count > 0,
            "reward.verifier.accuracy",
            self.accuracy,
            "all three weights are 0: give one a weight",
        )
        _at_least("reward.verifier", self, workers=1)
        require(
            self.timeout > 0,
            "reward.verifier.timeout",
            self.timeout,
            "is seconds a completion may take: must be above 0",
        )


@dataclass
@yaml_defaults("reward/classifier.yaml:classifier")
class RewardModelConfig:
    """Settings that every reward model needs: weights, lengths in its own tokens, and the number of tokens in
    one forward pass."""

    name_or_path: str
    revision: str | None
    dtype: str
    max_length: int
    max_prompt_length: int
    batch_tokens: int

    def __post_init__(self) -> None:
        key = self._key()
        one_of(f"{key}.dtype", self.dtype, ("float32", "bfloat16"))
        require(
            1 <= self.max_prompt_length < self.max_length,
            f"{key}.max_prompt_length",
            self.max_prompt_length,
            f"must be at least 1 and less than {key}.max_length={self.max_length}, or no room is left for a "
            "completion",
        )
        require(self.batch_tokens >= 1, f"{key}.batch_tokens", self.batch_tokens, "must be at least 1")

    @property
    def loads_model(self) -> bool:
        """Whether the run itself loads the model."""
        return True

    def _key(self) -> str:
        return "reward.armorm"


@dataclass
@yaml_defaults("reward/classifier.yaml:classifier")
class ClassifierConfig(RewardModelConfig):
    """A sequence classifier with one label. ``rendering`` says where the scored text ends."""

    rendering: str

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("reward.classifier.rendering", self.rendering, ("template", "turn"))

    def _key(self) -> str:
        return "reward.classifier"


@dataclass
@yaml_defaults("reward/teacher.yaml:teacher")
class TeacherConfig(EndpointConfig):
    """A language model that gives the likelihood of each token of a sample. It is loaded here, or runs behind
    an endpoint."""

    name_or_path: str
    revision: str | None
    dtype: str
    batch_size: int
    base_url: str | None
    model: str | None

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("reward.teacher.dtype", self.dtype, ("float32", "bfloat16"))
        _at_least("reward.teacher", self, batch_size=1)
        if self.base_url is not None:
            check_address("reward.teacher.base_url", self.base_url, "is where /completions is found")
        for key in ("model", "api_key_env"):
            require(
                self.base_url is not None or getattr(self, key) is None,
                f"reward.teacher.{key}",
                getattr(self, key),
                "is of an endpoint, and reward.teacher.base_url=null has none: leave one of them out",
            )

    @property
    def loads_model(self) -> bool:
        """Whether the run itself loads the model."""
        return self.base_url is None

    def section(self) -> str:
        return "reward.teacher"


@dataclass
@yaml_defaults("reward/judge.yaml:judge")
class JudgeConfig(EndpointConfig):
    """A language model behind an OpenAI-compatible endpoint that is asked for a score."""

    model: str
    pattern: str
    min_score: float
    max_score: float
    temperature: float
    max_tokens: int
    max_calls: int
    max_total_tokens: int
    base_url: str
    system: str | None
    prompt: str

    def __post_init__(self) -> None:
        super().__post_init__()
        check_address("reward.judge.base_url", self.base_url, "is where /chat/completions is found")
        require(
            "{completion}" in self.prompt,
            "reward.judge.prompt",
            "…",
            "must contain {completion}, and may contain {prompt} and {reference}",
        )
        require(
            _groups(self.pattern) == 1,
            "reward.judge.pattern",
            self.pattern,
            "must be a regular expression with one group, the number",
        )
        require(
            self.min_score < self.max_score,
            "reward.judge.min_score",
            self.min_score,
            f"must be below reward.judge.max_score={self.max_score}",
        )
        require(self.temperature >= 0, "reward.judge.temperature", self.temperature, "must be 0 or more")
        _at_least("reward.judge", self, max_tokens=1, max_calls=1, max_total_tokens=1)

    def section(self) -> str:
        return "reward.judge"


@dataclass
@yaml_defaults("reward/http.yaml:http")
class HttpConfig(EndpointConfig):
    """A reward server of the user's own that returns scores."""

    base_url: str
    batch_size: int
    conversational: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        check_address("reward.http.base_url", self.base_url, "is where the reward server is asked")
        _at_least("reward.http", self, batch_size=1)

    def section(self) -> str:
        return "reward.http"


@dataclass(frozen=True)
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
        from omegaconf import OmegaConf  # imported here: a run without a reward needs neither

        from config.typed import typed

        own = {key: tree.get(key) for key in OWN_KEYS}
        for key in ("name", "_target_", "settings_type"):
            require(
                isinstance(own[key], str),
                f"reward.{key}",
                own[key],
                "must be a text: choose a file of config/reward",
            )
        share = own["max_missing"]
        require(
            isinstance(share, int | float) and not isinstance(share, bool) and 0 <= share <= 1,
            "reward.max_missing",
            share,
            "is the share of completions that may go without a verdict: must lie in [0, 1]",
        )
        needs = own["needs_reference"]
        require(isinstance(needs, bool), "reward.needs_reference", needs, "must be true or false")
        kinds = [key for key in tree if key not in OWN_KEYS]
        require(
            len(kinds) == 1 and isinstance(tree[kinds[0]], dict),
            "reward",
            " and ".join(map(str, kinds)) or None,
            "has exactly one section, the settings of its kind: choose a file of config/reward",
        )
        schema = import_function("reward.settings_type", str(own["settings_type"]))
        require(is_dataclass(schema), "reward.settings_type", own["settings_type"], "is not a dataclass")
        settings = typed(OmegaConf.create(tree[kinds[0]]), schema, f"reward.{kinds[0]}.")
        share, needs = float(str(share)), bool(needs) or _compares(settings)
        return cls(str(own["name"]), share, needs, str(own["_target_"]), kinds[0], settings)

    @classmethod
    def of_kind(cls, kind: str, settings: Any, max_missing: float | None = None) -> RewardConfig:
        """Return the reward of config/reward/<kind>.yaml with other settings, for code that already has the
        settings."""
        tree = section(f"reward/{kind}.yaml")
        share = float(tree["max_missing"]) if max_missing is None else max_missing
        needs = bool(tree["needs_reference"]) or _compares(settings)
        return cls(kind, share, needs, str(tree["_target_"]), kind, settings)

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


OWN_KEYS = ("name", "max_missing", "needs_reference", "_target_", "settings_type")
"""Keys of a reward's yaml other than the section of its kind."""


def completed(tree: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of a reward's yaml, checked, with every default of its kind filled in. Raises
    ConfigError."""
    config = RewardConfig.from_tree(tree)
    return {key: tree[key] for key in OWN_KEYS} | {config.kind: asdict(config.settings)}


def _at_least(prefix: str, section: object, **least: int) -> None:
    for key, value in least.items():
        require(
            getattr(section, key) >= value,
            f"{prefix}.{key}",
            getattr(section, key),
            f"must be at least {value}",
        )


def _groups(pattern: str) -> int:
    try:
        return re.compile(pattern).groups
    except re.error:
        return -1
