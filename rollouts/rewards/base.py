"""The reward interface, which gives each completion a number or no verdict. A missing verdict never counts as
a score of 0, and too many of them stop the run."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from common.errors import StoppedError
from data.types import Completion, Prompt
from rollouts.rewards.early import Arrivals, parts_that_begin

if TYPE_CHECKING:
    from models.ranks import Ranks  # a verifier needs no torch

EXAMPLES = 3
"""How many reasons, and how many completions without a verdict, an error message shows."""

LOG_NAME = "reward-{}.log"
"""Name of a worker process's log in a scorer's ``log_dir``, to be formatted with the worker's number."""

_SHOWN = 120


class RewardError(StoppedError):
    """A reward that cannot continue, because it gave too few verdicts or because none of its requests could
    be answered."""


@dataclass(frozen=True)
class Missing:
    """The absence of a verdict, with its reason. Reasons are counted, so a reason does not name the
    completion."""

    reason: str


class Reward(Protocol):
    """The interface through which a round obtains scores."""

    metrics: dict[str, float]
    """Metrics of the last ``score``: ``missing`` (share of completions without a verdict), ``seconds``, and
    those that the kind of reward adds."""

    def score(self, prompts: Sequence[Prompt], completions: Sequence[str]) -> list[float | None]:
        """Return one finite reward for each completion, or None for no verdict. ``completions[i]`` answers
        ``prompts[i]``.

        Raises RewardError.
        """

    def arrivals(self, count: int) -> Arrivals | None:
        """Return a collector that takes ``count`` completions as they are sampled and begins to score them
        early, or None for a reward that waits for all of them. ``score`` is called with the completions in
        either case."""

    @property
    def gives_tokens(self) -> bool:
        """Whether the reward scores tokens (``score_tokens``) and not whole completions."""

    def score_tokens(
        self, prompts: Sequence[Prompt], samples: Sequence[tuple[np.ndarray, Completion]]
    ) -> list[tuple[float, ...] | None]:
        """Return a finite reward for each token of each completion, or None for no verdict. Each sample is
        (its [P] prompt tokens, the completion). Raises RewardError."""

    def check_tokenizer(self, tokenizer: Any) -> None:
        """Raise ConfigError if the tokens of ``tokenizer`` are not the ones that this reward scores."""

    def share_over(self, ranks: Ranks) -> None:
        """Let every rank score a share with its own models whenever rank 0 scores from now on, and release
        them whenever rank 0 releases. Every rank calls this once. Ranks above 0 hold a reward made of the
        models alone (``RewardConfig.models_alone``)."""

    def release(self) -> None:
        """Free the accelerator's memory until the next ``score``."""

    def close(self) -> None:
        """End processes and threads. Nothing can be scored afterwards."""


class Scorer(Protocol):
    """One kind of reward. It gives the reason for each missing verdict and leaves the policy on missing
    verdicts to ``Checked``.

    A scorer whose settings have a true ``loads_model`` also has ``share_over``, as in ``Reward``. A scorer
    that works in other processes or through network calls may have ``chunk`` and ``begin``
    (``rollouts.rewards.early``).
    """

    metrics: dict[str, float]
    log_dir: Path | None
    """Directory where worker processes write what they print and the exceptions that they raise; None for
    none."""

    def score(self, prompts: Sequence[Prompt], completions: Sequence[str]) -> list[float | Missing]:
        """Return one reward for each completion, or the reason why there is none."""

    def release(self) -> None: ...

    def close(self) -> None: ...


class Checked:
    """A Reward made of a Scorer. Numbers that are not finite become missing verdicts, and a share of missing
    verdicts above ``max_missing`` is an error."""

    def __init__(self, scorer: Scorer, max_missing: float) -> None:
        self.scorer, self.max_missing = scorer, max_missing
        self.metrics: dict[str, float] = {}

    def score(self, prompts: Sequence[Prompt], completions: Sequence[str]) -> list[float | None]:
        assert len(prompts) == len(completions), "one prompt a completion"
        start = time.monotonic()
        verdicts = [finite(v) for v in self.scorer.score(prompts, completions)]
        self._account(verdicts, prompts, completions, start)
        return [None if isinstance(v, Missing) else v for v in verdicts]

    def arrivals(self, count: int) -> Arrivals | None:
        begin = parts_that_begin(self.scorer)
        return Arrivals(begin, count) if begin else None

    @property
    def gives_tokens(self) -> bool:
        return hasattr(self.scorer, "score_tokens")

    def check_tokenizer(self, tokenizer: Any) -> None:
        scorer: Any = self.scorer
        scorer.check_tokenizer(tokenizer)

    def score_tokens(
        self, prompts: Sequence[Prompt], samples: Sequence[tuple[np.ndarray, Completion]]
    ) -> list[tuple[float, ...] | None]:
        start = time.monotonic()
        scorer: Any = self.scorer
        found = scorer.score_tokens(samples)
        verdicts = [v if isinstance(v, Missing) else finite(fmean(v)) for v in found]
        self._account(verdicts, prompts, [c.text or "" for _, c in samples], start)
        return [None if isinstance(v, Missing) else tokens for v, tokens in zip(verdicts, found, strict=True)]

    def share_over(self, ranks: Ranks) -> None:
        if hasattr(self.scorer, "share_over"):
            self.scorer.share_over(ranks)

    def _account(
        self,
        verdicts: Sequence[float | Missing],
        prompts: Sequence[Prompt],
        completions: Sequence[str],
        start: float,
    ) -> None:
        """Record the metrics, and raise RewardError if too many verdicts are missing."""
        assert len(verdicts) == len(completions), (
            f"{type(self.scorer).__name__} gave another number of verdicts"
        )
        share = sum(isinstance(v, Missing) for v in verdicts) / max(1, len(verdicts))
        self.metrics = self.scorer.metrics | {"missing": share, "seconds": time.monotonic() - start}
        if share > self.max_missing:
            told = _too_many(verdicts, prompts, completions, self.max_missing)
            if self.scorer.log_dir is not None:
                told += f"\nwhat it printed and raised, in full: {self.scorer.log_dir}/{LOG_NAME.format('*')}"
            raise RewardError(told)

    def release(self) -> None:
        self.scorer.release()

    def close(self) -> None:
        self.scorer.close()


def finite(verdict: float | Missing) -> float | Missing:
    """Return ``verdict`` unchanged, or a missing verdict if it is nan or infinite."""
    if isinstance(verdict, Missing) or math.isfinite(verdict):
        return verdict
    return Missing(f"the reward is {verdict}")


def _too_many(
    verdicts: Sequence[float | Missing], prompts: Sequence[Prompt], completions: Sequence[str], cap: float
) -> str:
    missing = [
        (v.reason, p, c)
        for v, p, c in zip(verdicts, prompts, completions, strict=True)
        if isinstance(v, Missing)
    ]
    reasons = Counter(reason for reason, _, _ in missing)
    lines = [
        f"{len(missing)} of {len(verdicts)} completions got no verdict, more than reward.max_missing={cap:g}"
    ]
    lines += [f"  {count} x {reason}" for reason, count in reasons.most_common(EXAMPLES)]
    lines += [
        f"  e.g. prompt {prompt.id}, completion {_short(completion)}: {reason}"
        for reason, prompt, completion in missing[:EXAMPLES]
    ]
    return "\n".join(
        [*lines, "mend the reward, or raise reward.max_missing if going on without them is right"]
    )


def _short(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else text[:_SHOWN] + "…")
