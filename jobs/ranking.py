"""The order of a run's evaluations and checkpoints, by the metric that ``keep_best`` names, and early
stopping once ``patience`` evaluations in a row were no better than the best before them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from models.checkpoint import Checkpoints
from models.distributed import World


class Ranking:
    """Converts values of a metric to scores, of which the higher is better."""

    def __init__(self, metric: str | None) -> None:
        self.metric = metric
        self._sign = -1 if (metric or "").endswith("_loss") else 1

    def score(self, evaluated: Mapping[str, float | None]) -> float | None:
        """Return the score of an evaluation; None where the metric was not evaluated."""
        value = evaluated.get(self.metric or "")
        return None if value is None else self._sign * value

    def is_of(self, state: Mapping[str, Any], shown: bool) -> bool:
        """Return whether a checkpoint with this state was written with the same ``keep_best``; if not, and
        if ``shown``, print what follows."""
        before = state["keep_best"]
        if before != self.metric and shown:
            print(
                f"keep_best was {before} and is {self.metric} now: earlier checkpoints rank by their value "
                "of it, and patience counts anew",
                flush=True,
            )
        return bool(before == self.metric)


class RankedCheckpoints(Checkpoints):
    """Checkpoints of which the best one by a ranking stays. Each records all that was evaluated at its step,
    so a run that goes on with another ``keep_best`` ranks its earlier checkpoints by the new metric too."""

    def __init__(self, folder: Path, world: World, keep: int, behind: bool, ranking: Ranking) -> None:
        super().__init__(folder, world, keep, behind)
        self.ranking = ranking

    def score(self, state: dict[str, Any]) -> float | None:
        return self.ranking.score(state.get("evaluated") or {})


class EnoughError(Exception):
    """Raised to end training before its planned end; the message says why.

    The final evaluation, checkpoint and export still have to be done."""


class Patience:
    """Counts evaluations without improvement. ``limit``: evaluations in a row; None for no early stop."""

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self.best: float | None = None
        self.no_better = 0

    def judge(self, score: float | None) -> None:
        """Record an evaluation's score, higher is better; None where nothing was evaluated."""
        if score is None:
            return
        if self.best is None or score > self.best:
            self.best, self.no_better = score, 0
        else:
            self.no_better += 1

    @property
    def spent(self) -> bool:
        return self.limit is not None and self.no_better >= self.limit

    def state(self) -> dict[str, float | int | None]:
        return {"best": self.best, "no_better": self.no_better}

    def restore(self, state: dict[str, float | int | None]) -> None:
        self.best, self.no_better = state["best"], int(state["no_better"] or 0)
