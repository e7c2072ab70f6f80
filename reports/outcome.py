"""How a run ended, as ``summary.json``, the printed table, the model card and a sweep's results say it."""

from __future__ import annotations

from typing import Any

LONGER, FAR = 10.0, 1.0
"""Growth of sampled answers in tokens, and KL divergence from the initial weights in nats a token, from which
on a run says so."""
FINISHED, STOPPED_EARLY, NOTHING_LEARNT = "finished", "stopped early", "nothing learnt"


def outcome(steps: int, skipped: int, silent: int, stopped_why: str | None) -> dict[str, Any]:
    """Return the part of ``summary.json`` that says how a run ended. ``skipped``: the number of updates that
    were skipped for a gradient that was not finite. ``silent``: the number of the others that had no signal,
    because all their advantages or their whole gradient were 0. ``stopped_why``: why the run ended before its
    planned end; None where it did not."""
    stopped_early = stopped_why is not None
    learnt = steps > skipped + silent or (stopped_early and steps == 0)  # asked to stop before it began
    return {
        "status": (STOPPED_EARLY if stopped_early else FINISHED) if learnt else NOTHING_LEARNT,
        "stopped_early": stopped_early,
        "stopped_why": stopped_why,
        "skipped_steps": skipped,
        "silent_steps": silent,
    }


def drifted(summary: dict[str, Any]) -> list[str]:
    """Return what a run says that has gone far from its start: that answers grew by LONGER tokens or more, or
    that the KL divergence from the initial weights is above FAR. A run that does either often fails."""
    before, after = summary.get("before") or {}, summary.get("after") or {}
    drifts = []
    was, now = (values.get("eval_length_sampled") for values in (before, after))
    if was is not None and now is not None and now - was >= LONGER:
        drifts.append(f"answers grew by {now - was:.0f} tokens")
    if (kl := after.get("eval_kl_initial")) is not None and kl > FAR:
        drifts.append(f"the KL divergence from the start is {kl:.2f} nats a token")
    return drifts


def symptoms(summary: dict[str, Any]) -> list[str]:
    """Return what docs/symptoms.md explains of an outcome: updates that were not done or taught nothing, and
    ``drifted``."""
    of_updates = f"of {summary.get('steps', 0)} updates"
    counts = [
        f"{count} {of_updates} {what}"
        for key, what in (
            ("skipped_steps", "skipped, as their gradients were not finite"),
            ("silent_steps", "without a signal: all their advantages, or their whole gradient, were 0"),
        )
        if (count := summary.get(key))
    ]
    return counts + drifted(summary)


def text_of(summary: dict[str, Any]) -> str | None:
    """Return the outcome in a sentence; None where every update of a finished run was done and it stayed near
    its start (``symptoms``)."""
    status, found = summary.get("status", FINISHED), symptoms(summary)
    if why := summary.get("stopped_why"):
        found = [why, *found] if status == STOPPED_EARLY else [*found, f"{STOPPED_EARLY}: {why}"]
    parts = ("" if status == FINISHED else status, "; ".join(found))
    return ": ".join(part for part in parts if part) or None
