"""Settings of online rounds (paper, Algorithm 1 and §5)."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from config.sections import (
    All,
    Auto,
    Count,
    Natural,
    NotNegative,
    Off,
    Positive,
    SmallShare,
    dataclass,
    must,
    need,
    yaml_defaults,
)

CENTRES = ("mean", "median")
"""Values of rounds.threshold that are taken from the scores."""
DESIRABLE = (
    "is the score from which a sample is desirable: a number, as in rounds.threshold=0.5, or mean or median, "
    "of the round's scores"
)
Threshold = Annotated[
    Any,
    must(lambda at: at in CENTRES or type(at) in (int, float), DESIRABLE),
    must(lambda at: at in CENTRES or math.isfinite(at), "must be finite"),
]


@dataclass
@yaml_defaults("config.yaml:rounds")
class RoundsConfig:
    """How the policy is sampled and how the samples are used. config/config.yaml says what each key means."""

    contexts: Count
    contexts_per_round: Count
    examples: All[Count]
    samples: Count
    feedback: Literal["pair", "random", "min", "threshold", "group"]
    tau: Annotated[NotNegative, "is the least difference of two rewards"]
    threshold: Threshold
    zero_variance: Auto[Literal["drop", "keep"]]
    truncated: Literal["keep", "drop", "mask"]
    overlong: Off[Annotated[Count, "counts tokens: must be at least 1, or off for no penalty"]]
    overlong_penalty: Annotated[Positive, "is taken from a score: must be above 0"]
    fill: bool
    lag: Annotated[Natural, "counts rounds"]
    passes: Count
    replay: Annotated[SmallShare, "is a share of a round's contexts"]
    compress: bool
    keep_weights: bool
    reset_reference: bool

    def __post_init__(self) -> None:
        most = f"must be at most rounds.contexts={self.contexts}, the whole run's"
        need(self, self.contexts_per_round <= self.contexts, "contexts_per_round", most)
        taken, each = self.replayed(1), self.contexts_per_round
        both = f"is {taken} of rounds.contexts_per_round={each} contexts: a round replays one and samples one"
        need(self, self.replay == 0 or 0 < taken < each, "replay", both)
        unseen = "needs rounds.lag=0: with a lag the next round is under way when this one's yield is known"
        need(self, self.lag == 0 or self.examples is None, "examples", unseen)
        no_pair = "needs rounds.feedback=group: equal rewards make no pair"
        need(self, self.zero_variance != "keep" or self.feedback == "group", "zero_variance", no_pair)
        compares = "needs rounds.feedback=group, whose advantages compare all samples; use drop"
        need(self, self.truncated != "mask" or self.feedback == "group", "truncated", compares)

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
