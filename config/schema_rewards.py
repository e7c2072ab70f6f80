"""The settings of a reward: one section of ``RewardConfig`` for each kind of reward, exactly one of which is given."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, fields

from common.errors import one_of, require


@dataclass
class FunctionConfig:
    """A Python function with TRL's signature, run in worker processes that are killed when they take too long."""

    path: str = "???"
    batch_size: int = 64
    workers: int = 1
    timeout: float = 60.0
    conversational: bool = True

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
class VerifierConfig:
    """Answers that can be checked: weights of the three parts (paper, Table 2) and the limits of a check."""

    accuracy: float = 8.0
    format: float = 1.0
    tag_count: float = 1.0
    workers: int = 4
    timeout: float = 10.0

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
class RewardModelConfig:
    """What every reward model needs: weights, lengths in its own tokens, and how many tokens go through it at once."""

    name_or_path: str = "???"
    revision: str | None = None
    dtype: str = "bfloat16"
    max_length: int = 4096
    max_prompt_length: int = 2048
    batch_tokens: int = 32768

    def __post_init__(self) -> None:
        key = self._key()
        one_of(f"{key}.dtype", self.dtype, ("float32", "bfloat16"))
        require(
            1 <= self.max_prompt_length < self.max_length,
            f"{key}.max_prompt_length",
            self.max_prompt_length,
            f"must be at least 1 and less than {key}.max_length={self.max_length}, or no room is left for a completion",
        )
        require(self.batch_tokens >= 1, f"{key}.batch_tokens", self.batch_tokens, "must be at least 1")

    def _key(self) -> str:
        return "reward.armorm"


@dataclass
class ClassifierConfig(RewardModelConfig):
    """A sequence classifier with one label. ``rendering``: where the text that is scored ends."""

    rendering: str = "template"

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("reward.classifier.rendering", self.rendering, ("template", "turn"))

    def _key(self) -> str:
        return "reward.classifier"


@dataclass
class JudgeConfig:
    """A language model behind an OpenAI-compatible endpoint that is asked for a number."""

    base_url: str = "???"
    model: str = "???"
    prompt: str = "???"
    api_key_env: str | None = "OPENAI_API_KEY"
    pattern: str = r"\[\[\s*(-?\d+(?:\.\d+)?)\s*\]\]"
    min_score: float = 1.0
    max_score: float = 10.0
    temperature: float = 0.0
    max_tokens: int = 512
    concurrency: int = 16
    timeout: float = 60.0
    retries: int = 5
    backoff: float = 1.0
    max_calls: int = 100_000
    max_total_tokens: int = 100_000_000

    def __post_init__(self) -> None:
        require(
            self.base_url.startswith(("http://", "https://")),
            "reward.judge.base_url",
            self.base_url,
            "is where /chat/completions is found: must start with http:// or https://",
        )
        require(
            "{completion}" in self.prompt,
            "reward.judge.prompt",
            "…",
            "must contain {completion}, and may contain {prompt} and {reference}",
        )
        require(
            self.api_key_env is None or self.api_key_env in os.environ,
            "reward.judge.api_key_env",
            self.api_key_env,
            "is the name of the environment variable that holds the endpoint's key (never the key itself), and is not set; "
            "set that variable, or give null for no key",
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
        _at_least(
            "reward.judge", self, max_tokens=1, concurrency=1, retries=0, max_calls=1, max_total_tokens=1
        )
        require(
            self.timeout > 0,
            "reward.judge.timeout",
            self.timeout,
            "is seconds a call may take: must be above 0",
        )
        require(
            self.backoff > 0,
            "reward.judge.backoff",
            self.backoff,
            "is seconds before the first retry: must be above 0",
        )


@dataclass
class RewardConfig:
    """A reward. Exactly one of the sections is given, and says which kind it is."""

    name: str = "???"
    max_missing: float = 0.1
    function: FunctionConfig | None = None
    verifier: VerifierConfig | None = None
    armorm: RewardModelConfig | None = None
    classifier: ClassifierConfig | None = None
    judge: JudgeConfig | None = None

    def __post_init__(self) -> None:
        require(
            0 <= self.max_missing <= 1,
            "reward.max_missing",
            self.max_missing,
            "is the share of completions that may go without a verdict: must lie in [0, 1]",
        )
        kinds = [f.name for f in fields(self) if f.name not in ("name", "max_missing")]
        given = [kind for kind in kinds if getattr(self, kind) is not None]
        require(
            len(given) == 1, "reward", " and ".join(given) or None, f"give exactly one of {', '.join(kinds)}"
        )


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
