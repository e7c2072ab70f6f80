"""Reward functions of the tasks that come with the project. They have the signature of any reward
function."""

from __future__ import annotations

from data.adder import rewards


def adder(completions: list[str], reference: list[str | None]) -> list[float | None]:
    """Return the reward of the embedded adder task: accuracy, form and separators, weighted 8 : 1 : 1, in [0,
    10]."""
    return rewards(completions, reference)
