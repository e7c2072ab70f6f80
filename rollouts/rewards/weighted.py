"""A reward that is the weighted sum of several rewards, each of which is also logged by itself."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from common.imports import import_function
from data.types import Prompt
from data.views import advantages
from rollouts.rewards.base import Missing, Scorer, finite
from rollouts.rewards.settings import WeightedConfig

if TYPE_CHECKING:
    import torch

    from models.distributed import Ranks


class WeightedReward(Scorer):
    """Weighted sum of several scorers. A completion has no verdict if any of the parts gives none."""

    def __init__(self, settings: WeightedConfig, device: torch.device | str, log_dir: Path | None) -> None:
        """Raises ConfigError, also for a part."""
        self.log_dir = log_dir
        self.metrics: dict[str, float] = {}
        self.normalize = settings.normalize
        self.weights = {name: part.weight for name, part in settings.typed().items()}
        self.parts: dict[str, Scorer] = {}
        with ExitStack() as stack:  # closes the parts made so far if a later one fails
            for name, part in settings.typed().items():
                make = import_function("reward._target_", part.reward.target)
                with settings.of_part(name):
                    scorer = make(part.reward.settings, device, None if log_dir is None else log_dir / name)
                stack.callback(scorer.close)
                self.parts[name] = scorer
            self._close = stack.pop_all()

    def score(self, prompts: Sequence[Prompt], completions: Sequence[str]) -> list[float | Missing]:
        """Return the weighted sum for each completion. ``metrics`` gets ``reward_NAME``, the mean of a part's
        scores before weighting, and the part's own metrics as ``of_NAME_...``."""
        self.metrics = {}
        totals: list[float | Missing] = [0.0] * len(completions)
        for name, scorer in self.parts.items():
            verdicts = [finite(verdict) for verdict in scorer.score(prompts, completions)]
            scores = [verdict for verdict in verdicts if not isinstance(verdict, Missing)]
            if scores:
                self.metrics[f"reward_{name}"] = fmean(scores)
            if self.normalize == "group":
                verdicts = normalised_apart(prompts, verdicts)
            self.metrics |= {f"of_{name}_{key}": value for key, value in scorer.metrics.items()}
            totals = [
                self._added(name, total, verdict) for total, verdict in zip(totals, verdicts, strict=True)
            ]
        return totals

    def _added(self, name: str, total: float | Missing, verdict: float | Missing) -> float | Missing:
        if isinstance(total, Missing):
            return total
        if isinstance(verdict, Missing):
            return Missing(f"{name}: {verdict.reason}")
        return total + self.weights[name] * verdict

    def check_prompts(self, prompts: Sequence[Prompt]) -> None:
        """Check what each part needs of the prompts, as in ``Reward.check_prompts``."""
        for scorer in self.parts.values():
            if hasattr(scorer, "check_prompts"):
                scorer.check_prompts(prompts)

    def share_over(self, ranks: Ranks) -> None:
        """Share the scoring of those parts that are models, as in ``Reward.share_over``."""
        for scorer in self.parts.values():
            if hasattr(scorer, "share_over"):
                scorer.share_over(ranks)

    def release(self) -> None:
        for scorer in self.parts.values():
            scorer.release()

    def close(self) -> None:
        self._close.close()


def normalised_apart(prompts: Sequence[Prompt], scores: Sequence[float | Missing]) -> list[float | Missing]:
    """Return one reward's scores less the mean and divided by the std of the scores that completions of the
    same prompt got; 0 where they are all equal (GDPO, Liu et al. 2026, arXiv 2601.05242, with the population
    std and without epsilon)."""
    groups: dict[str, dict[int, float]] = {}
    for i, (prompt, score) in enumerate(zip(prompts, scores, strict=True)):
        if not isinstance(score, Missing):
            groups.setdefault(prompt.id, {})[i] = score
    out = list(scores)
    for group in groups.values():
        for i, value in zip(group, advantages(group.values()), strict=True):
            out[i] = value
    return out


def make(settings: WeightedConfig, device: torch.device | str, log_dir: Path | None) -> WeightedReward:
    """The reward of config/reward/weighted.yaml. Raises ConfigError."""
    return WeightedReward(settings, device, log_dir)
