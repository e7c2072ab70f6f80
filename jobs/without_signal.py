"""Rounds from which nothing can be learnt, and what is said of them."""

from __future__ import annotations

from typing import Any

from config.schema import Config
from data.views import exceeds


def without_signal(index: int, metrics: dict[str, Any], config: Config) -> str | None:
    """Return a warning for round ``index`` if nothing in it tells a better answer from a worse one, with the
    spread of its rewards and what may be changed; None for any other round. ``metrics``: those of the round's
    samples."""
    if (what := _what(metrics, config)) is None:
        return None
    return (
        f"warning: round {index}: {what}, so there is nothing to learn from it. See whether reward="
        f"{config.reward_config.name} gets what it needs; if these rewards are right, other prompts, a "
        f"higher sampler.temperature ({config.sampler.temperature:g} now) or more rounds.samples "
        f"({config.rounds.samples} now) may give answers that differ (docs/symptoms.md)"
    )


def _what(metrics: dict[str, Any], config: Config) -> str | None:
    lowest, highest, equal = (
        metrics.get(name) for name in ("lowest_reward", "highest_reward", "zero_variance")
    )
    if lowest is None or highest is None:
        return "no sample has a reward"
    if not exceeds(highest, lowest):
        return f"every sample has the reward {lowest:g}"
    if config.rounds.feedback == "threshold" or (equal < 1 and metrics["keep_rate"] > 0):
        return None
    by = f" by rounds.tau={config.rounds.tau:g}" if equal < 1 else ""
    return f"of no prompt two samples have rewards that differ{by}; all lie in [{lowest:g}, {highest:g}]"
