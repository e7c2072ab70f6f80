"""Settings of online rounds (paper, Algorithm 1 and §5)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from common.errors import one_of, require
from config.defaults import yaml_defaults

CENTRES = ("mean", "median")
"""Values of rounds.threshold that are taken from the scores."""


@dataclass
@yaml_defaults("config.yaml:rounds")
class RoundsConfig:
    """How the policy is sampled and how the samples are used. config/config.yaml says what each key means."""

    contexts: int
    contexts_per_round: int
    examples: int | None
    samples: int
    feedback: str
    tau: float
    threshold: Any
    zero_variance: str | None
    truncated: str
    fill: bool
    lag: int
    passes: int
    replay: float
    compress: bool
    keep_weights: bool
    reset_reference: bool

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
        self._check_feedback()
        require(self.lag >= 0, "rounds.lag", self.lag, "counts rounds: must be 0 or more")
        require(self.passes >= 1, "rounds.passes", self.passes, "must be at least 1")
        require(
            0 <= self.replay < 1,
            "rounds.replay",
            self.replay,
            "is a share of a round's contexts: must be at least 0 and below 1",
        )
        require(
            self.replay == 0 or 0 < self.replayed(1) < self.contexts_per_round,
            "rounds.replay",
            self.replay,
            f"is {self.replayed(1)} of rounds.contexts_per_round={self.contexts_per_round} contexts: a round "
            "must replay at least one and sample at least one",
        )
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

    def _check_feedback(self) -> None:
        one_of("rounds.feedback", self.feedback, ("pair", "random", "min", "threshold", "group"))
        require(
            self.threshold in CENTRES or type(self.threshold) in (int, float),
            "rounds.threshold",
            self.threshold,
            "is the score from which a sample is desirable: a number, as in rounds.threshold=0.5, or mean or "
            "median, of the round's scores",
        )
        one_of("rounds.zero_variance", self.zero_variance, (None, "drop", "keep"))
        one_of("rounds.truncated", self.truncated, ("keep", "drop", "mask"))
        require(
            self.truncated != "mask" or self.feedback == "group",
            "rounds.truncated",
            "mask",
            "needs rounds.feedback=group, whose advantages compare all samples; use drop",
        )
        require(
            self.zero_variance != "keep" or self.feedback == "group",
            "rounds.zero_variance",
            "keep",
            "needs rounds.feedback=group: equal rewards make no pair",
        )

    def replayed(self, index: int) -> int:
        """Return the number of contexts of round ``index`` that are taken from earlier rounds; the first
        round has none."""
        return round(self.contexts_per_round * self.replay) if index > 0 else 0

    def sampled(self, index: int) -> int:
        """Return the number of contexts that round ``index`` samples itself (or, with ``fill``, keeps)."""
        return self.contexts_per_round - self.replayed(index)

    @property
    def most_contexts(self) -> int:
        """Maximum number of contexts that the rounds of a run train on, replayed ones included."""
        more = self.contexts - self.contexts_per_round
        rounds_after = max(0, -(-more // self.sampled(1)))
        return self.contexts + rounds_after * self.replayed(1)

    @property
    def keeps_equal(self) -> bool:
        """Whether groups of equal rewards are trained on. They have advantage 0 and their tokens are counted,
        so that compared runs with verifiable rewards take the same number of steps."""
        return self.feedback == "group" and self.zero_variance != "drop"
