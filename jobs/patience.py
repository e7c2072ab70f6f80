"""Early stopping once ``patience`` evaluations in a row were no better than the best before them."""

from __future__ import annotations


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
