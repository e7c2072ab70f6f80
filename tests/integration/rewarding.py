"""Reward functions that rounds are tested with. They live in a process of their own, whose module state they
may use."""

from __future__ import annotations

import os
import time

from data.adder import rewards

_calls = 0


def slow(completions: list[str], reference: list[str | None]) -> list[float | None]:
    """The embedded task's, after as many seconds as SLOW_REWARD says."""
    time.sleep(float(os.environ.get("SLOW_REWARD", 0)))
    return rewards(completions, reference)


def silent_second_time(completions: list[str], reference: list[str | None]) -> list[float | None]:
    """The embedded task's, but in the second call all are equal."""
    global _calls
    _calls += 1
    return [1.0] * len(completions) if _calls == 2 else rewards(completions, reference)


def nothing(completions: list[str]) -> list[float | None]:
    return [0.0] * len(completions)
