"""How a run ended, as ``summary.json``, the printed table, the model card and a sweep's results say it."""

from __future__ import annotations

from typing import Any

FINISHED, STOPPED_EARLY, NOTHING_LEARNT = "finished", "stopped early", "nothing learnt"


def outcome(steps: int, skipped: int, silent: int, stopped_early: bool) -> dict[str, Any]:
    """Return the part of ``summary.json`` that says how a run ended. ``skipped``: the number of updates that
    were skipped for a gradient that was not finite. ``silent``: the number of the others that had no signal,
    because all their advantages or their whole gradient were 0."""
    learnt = steps > skipped + silent
    return {
        "status": (STOPPED_EARLY if stopped_early else FINISHED) if learnt else NOTHING_LEARNT,
        "stopped_early": stopped_early,
        "skipped_steps": skipped,
        "silent_steps": silent,
    }


def told(summary: dict[str, Any]) -> str | None:
    """Return the outcome in a sentence; None where every update of a finished run was done."""
    of = f"of {summary.get('steps', 0)} updates"
    counts = [
        f"{count} {of} {what}"
        for key, what in (
            ("skipped_steps", "skipped, as their gradients were not finite"),
            ("silent_steps", "without a signal: all their advantages, or their whole gradient, were 0"),
        )
        if (count := summary.get(key))
    ]
    status = summary.get("status", FINISHED)
    return (
        ": ".join(part for part in ("" if status == FINISHED else status, "; ".join(counts)) if part) or None
    )
