"""Settings of what an evaluation measures about the retention of the initial weights' behaviour."""

from __future__ import annotations

from dataclasses import dataclass

from common.errors import require
from config.defaults import yaml_defaults


@dataclass
@yaml_defaults("config.yaml:retention")
class RetentionConfig:
    """config/config.yaml says what each key means."""

    kl: bool
    prompts: int | None
    tokens: int | None
    data: str | None
    path: str | None
    eval_path: str | None
    verifier: str | None

    def __post_init__(self) -> None:
        for key in ("prompts", "tokens"):
            value = getattr(self, key)
            require(value is None or value >= 1, f"retention.{key}", value, "must be at least 1, or null")
        for key in ("path", "eval_path", "verifier"):
            require(
                self.data is not None or getattr(self, key) is None,
                f"retention.{key}",
                getattr(self, key),
                "belongs to a second task: name it in retention.data",
            )
