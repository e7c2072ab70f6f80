"""Rewards of the tasks that come with the project, with the signature of any reward function."""

from __future__ import annotations

from data.adder import rewards


def adder(completions: list[str], reference: list[str | None]) -> list[float | None]:
    """The embedded task's: accuracy, form and separators, 8 : 1 : 1, in [0, 10]."""
    return rewards(completions, reference)
