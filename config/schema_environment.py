"""Settings of ``environment=``: who answers the policy while it is sampled."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import Field

from config.typed import Auto, Count, Positive, Text, dataclass, need, yaml_defaults

Role = Literal["tool", "user", "assistant"]
ROLES = get_args(Role)
TURNS = "counts turns of the policy: must be at least 2, or nobody answers it (environment=none)"


@dataclass
@yaml_defaults("environment/none.yaml")
class EnvironmentConfig:
    """The yaml files in config/environment say what each key means."""

    name: Text
    path: Text | None
    role: Role
    max_turns: Annotated[int, Field(ge=2), TURNS]
    max_turn_tokens: Auto[Count]
    stops: list[Text]
    timeout: Annotated[Positive, "is in seconds"]
    workers: Count
    options: dict[str, Any]

    def __post_init__(self) -> None:
        named = self.path is not None or self.name == "none"
        example = "name the function that answers the policy, as in environment.path=my_module.play"
        need(self, named, "path", example)
        need(
            self,
            self.role != "assistant" or self.path is None or self.stops != [],
            "stops",
            "environment.role=assistant goes on inside the policy's turn: name the tokens that interrupt it, "
            "as in 'environment.stops=[\"=\"]'",
        )

    @property
    def plays(self) -> bool:
        """Whether an environment answers the policy."""
        return self.path is not None
