"""The settings of online rounds (paper, Algorithm 1 and §5)."""

from __future__ import annotations

from dataclasses import dataclass

from common.errors import one_of, require
from config.defaults import yaml_defaults


@dataclass
@yaml_defaults("config.yaml:rounds")
class RoundsConfig:
    """How the policy is sampled and what becomes of the samples. config/config.yaml says what each key
    means."""

    contexts: int
    contexts_per_round: int
    examples: int | None
    samples: int
    feedback: str
    tau: float
    threshold: float
    zero_variance: str | None
    fill: bool
    lag: int

    def __post_init__(self) -> None:
        for key in ("contexts", "contexts_per_round", "samples"):
            require(getattr(self, key) >= 1, f"rounds.{key}", getattr(self, key), "must be at least 1")
        require(
            self.contexts_per_round <= self.contexts,
            "rounds.contexts_per_round",
            self.contexts_per_round,
            f"must be at most rounds.contexts={self.contexts}, the whole run's",
        )
        require(
            self.examples is None or self.examples >= 1,
            "rounds.examples",
            self.examples,
            "must be at least 1, or null",
        )
        one_of("rounds.feedback", self.feedback, ("pair", "random", "threshold", "group"))
        one_of("rounds.zero_variance", self.zero_variance, (None, "drop", "keep"))
        one_of("rounds.lag", self.lag, (0, 1))
        require(
            self.lag == 0 or self.examples is None,
            "rounds.examples",
            self.examples,
            "needs rounds.lag=0: what a round gives is only known once it was sampled, and with a lag the "
            "next is then under way",
        )
        require(
            self.tau >= 0, "rounds.tau", self.tau, "is the least difference of two rewards: must be 0 or more"
        )
        require(
            self.zero_variance != "keep" or self.feedback == "group",
            "rounds.zero_variance",
            "keep",
            "needs rounds.feedback=group: equal rewards make no pair",
        )

    @property
    def keeps_equal(self) -> bool:
        """Whether groups of equal rewards are trained on (with advantage 0, their tokens counted): so that
        verifiable runs that are compared take the same number of steps."""
        return self.feedback == "group" and self.zero_variance != "drop"
