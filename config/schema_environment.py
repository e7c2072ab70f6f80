"""Settings of ``environment=``: who answers the policy while it is sampled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from common.errors import one_of, require
from config.defaults import yaml_defaults

ROLES = ("tool", "user", "assistant")


@dataclass
@yaml_defaults("environment/none.yaml")
class EnvironmentConfig:
    """The yaml files in config/environment say what each key means."""

    name: str
    path: str | None
    role: str
    max_turns: int
    max_turn_tokens: int | None
    stops: list[str]
    timeout: float
    workers: int
    options: dict[str, Any]

    def __post_init__(self) -> None:
        require(
            self.path is not None or self.name == "none",
            "environment.path",
            self.path,
            "name the function that answers the policy, as in environment.path=my_module.play",
        )
        one_of("environment.role", self.role, ROLES)
        require(
            self.max_turns >= 2,
            "environment.max_turns",
            self.max_turns,
            "counts turns of the policy: must be at least 2, or nobody answers it (environment=none)",
        )
        require(
            self.max_turn_tokens is None or self.max_turn_tokens >= 1,
            "environment.max_turn_tokens",
            self.max_turn_tokens,
            "must be at least 1, or null",
        )
        require(self.timeout > 0, "environment.timeout", self.timeout, "is in seconds: must be above 0")
        require(self.workers >= 1, "environment.workers", self.workers, "must be at least 1")
        require(
            self.role != "assistant" or self.path is None or self.stops != [],
            "environment.stops",
            self.stops,
            "environment.role=assistant goes on inside the policy's turn: name the tokens that interrupt it, "
            "as in 'environment.stops=[\"=\"]'",
        )

    @property
    def plays(self) -> bool:
        """Whether an environment answers the policy."""
        return self.path is not None
