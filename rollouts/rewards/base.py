"""The reward interface, which gives each completion a number or no verdict. A missing verdict never counts as
a score of 0, and too many of them stop the run.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from common.errors import StoppedError, require
from common.imports import import_function
from common.progress import SOON, pause
from config.schema_rewards import RewardConfig
from data.json_values import LARGEST
from data.types import Prompt

if TYPE_CHECKING:
    import torch

    from models.distributed import Ranks  # a verifier needs no torch

V = TypeVar("V")

EXAMPLES = 3
"""How many reasons, and how many completions without a verdict, an error message shows."""

LOG_NAME = "reward.log"
"""Name of the log of a scorer's worker processes in its ``log_dir``."""

_SHOWN = 120


class RewardError(StoppedError):
    """A reward that cannot continue, because it gave too few verdicts or because none of its requests could
    be answered."""


@dataclass(frozen=True)
class Missing:
    """The absence of a verdict, with its reason. Reasons are counted, so a reason does not name the
    completion."""

    reason: str


def results(futures: Sequence[Future[V]]) -> list[V]:
    """Return what each task gives, in order. As soon as a task fails, its exception is raised, and those that
    have not ended are cancelled. Raises Requeue where the run is asked to stop meanwhile."""
    left = set(futures)
    try:
        while left:
            done, left = wait(left, SOON, FIRST_EXCEPTION)
            for future in filter(done.__contains__, futures):
                future.result()
            if left:
                pause()
        return [future.result() for future in futures]
    except BaseException:
        for future in futures:
            future.cancel()
        raise


class Scorer(ABC):
    """One kind of reward. It gives the reason for each missing verdict and leaves the policy on missing
    verdicts to ``Reward``. It may have ``check_prompts``, as in ``Reward``.

    A scorer whose settings have a true ``loads_model`` also has ``share_over``, as in ``Reward``.
    """

    metrics: Mapping[str, float] = MappingProxyType({})
    """Metrics of the last ``score`` that this kind of reward adds."""
    log_dir: Path | None = None
    """Directory where worker processes write what they print and the exceptions that they raise; None for
    none."""

    @abstractmethod
    def score(self, prompts: Sequence[Prompt], completions: Sequence[str]) -> list[float | Missing]:
        """Return one reward for each completion, or the reason why there is none."""

    def release(self) -> None:
        """Free the accelerator's memory until the next ``score``."""

    def close(self) -> None:
        """End processes and threads."""


class Reward:
    """The interface through which a round obtains scores, made of a Scorer. Numbers that are not finite
    become missing verdicts, and a share of missing verdicts above ``max_missing`` is an error."""

    def __init__(self, scorer: Scorer, max_missing: float) -> None:
        self.scorer, self.max_missing = scorer, max_missing
        self.metrics: dict[str, float] = {}
        """Metrics of the last ``score``: ``missing`` (share of completions without a verdict), ``seconds``,
        and those that the kind of reward adds."""

    def score(self, prompts: Sequence[Prompt], completions: Sequence[str]) -> list[float | None]:
        """Return one finite reward for each completion, or None for no verdict. ``completions[i]`` answers
        ``prompts[i]``.

        Raises RewardError.
        """
        assert len(prompts) == len(completions), "one prompt a completion"
        start = time.monotonic()
        verdicts = [finite(v) for v in self.scorer.score(prompts, completions)]
        assert len(verdicts) == len(completions), (
            f"{type(self.scorer).__name__} gave another number of verdicts"
        )
        share = sum(isinstance(v, Missing) for v in verdicts) / max(1, len(verdicts))
        self.metrics = {**self.scorer.metrics, "missing": share, "seconds": time.monotonic() - start}
        if share > self.max_missing:
            message = _too_many(verdicts, prompts, completions, self.max_missing)
            if self.scorer.log_dir is not None:
                message += f"\nwhat it printed and raised, in full: {self.scorer.log_dir}/{LOG_NAME}"
            raise RewardError(message)
        return [None if isinstance(v, Missing) else v for v in verdicts]

    def check_prompts(self, prompts: Sequence[Prompt]) -> None:
        """Raise ConfigError if the reward needs something of each prompt that none of them has."""
        if hasattr(self.scorer, "check_prompts"):
            self.scorer.check_prompts(prompts)

    def share_over(self, ranks: Ranks) -> None:
        """Let every rank score a share with its own models whenever rank 0 scores from now on, and release
        them whenever rank 0 releases. Every rank calls this once. Ranks above 0 hold a reward made of the
        models alone (``RewardConfig.models_alone``)."""
        if hasattr(self.scorer, "share_over"):
            self.scorer.share_over(ranks)

    def release(self) -> None:
        """Free the accelerator's memory until the next ``score``."""
        self.scorer.release()

    def close(self) -> None:
        """End processes and threads. Nothing can be scored afterwards."""
        self.scorer.close()


def make_reward(
    config: RewardConfig, device: torch.device | str = "cpu", log_dir: Path | None = None
) -> Reward:
    """Return the reward that ``config`` describes. A model loads onto ``device`` when it is first needed.
    Worker processes write what they print to ``log_dir``, which is created at the first ``score``; with None
    their output is not kept.

    The reward's module is imported here and not earlier, because a verifier needs no torch and a judge no
    transformers. Raises ConfigError for a function that cannot be imported, a tokenizer without a chat
    template, or a missing math-verify.
    """
    scorer = import_function("reward._target_", config.target)(config.settings, device, log_dir)
    why = f"made a {type(scorer).__name__}, which does not extend Scorer (rollouts/rewards/base.py)"
    require(isinstance(scorer, Scorer), "reward._target_", config.target, why)
    return Reward(scorer, config.max_missing)


def verdict_of(value: Any) -> float | Missing:
    """Return what a user's code or server gives for a completion as a number, or why that is no verdict."""
    if value is None:
        return Missing("no verdict was given (None)")
    if isinstance(value, (str, bytes)):  # float("1") would pass, and "nan" too
        return Missing(f"{value[:40]!r} was given, not a number")
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return Missing(f"{type(value).__name__} was given, not a number")


def finite(verdict: float | Missing) -> float | Missing:
    """Return ``verdict`` unchanged, or a missing verdict if it is not finite in float32, the precision in
    which it would be trained on: no file of groups may hold it."""
    if isinstance(verdict, Missing) or abs(verdict) <= LARGEST:
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
        [*lines, "fix the reward, or raise reward.max_missing if going on without them is right"]
    )


def _short(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else text[:_SHOWN] + "…")
