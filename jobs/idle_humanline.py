"""Decide at the start of a run whether humanline can change anything in it, since comparing two runs that are
identical by construction shows nothing.

Humanline does two things. First, it syncs: at steps 0, k, 2k … the reference becomes the policy as it is
before the update (``trainers.syncing``). The following steps use that reference until the next sync or the
end of their segment, because a round starts with the policy as its reference anyway, unless
``rounds.reset_reference`` is false. So the sync at step t changes a later step of its segment only if the
segment began before t and continues after t: in a segment of two steps, both steps use the policy at the
segment's start. Second, it clips. Clipping changes nothing where the bounds are infinite, or where each step
is the first of its segment, whose log-ratios are 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from config.schema import Config

ROUNDING = 0.01
"""Nats. Bounds closer to 0 than this may clip rounding errors, where policy and reference are computed in
different batches."""


def notice(config: Config, segments: Sequence[int], exact: bool) -> str | None:
    """Return the notice for a run in which humanline changes nothing, or clips while its syncing changes
    nothing; None for any other run.

    ``segments``: planned number of steps of each segment. ``exact``: whether the plan is exact, or segments
    may turn out shorter.
    """
    if not config.humanline or not segments:
        return None
    if config.keeps_reference:  # a reference that outlives rounds sees them as one segment
        segments = [sum(segments)]
    moot, clips = not moves(config, segments, exact), can_clip(config, max(segments))
    if clips and not moot:
        return None
    why = [_why_no_sync(config, segments)] if moot else []
    if not clips:
        why.append(
            "every step is the first with its reference, so that all log-ratios are 0"
            if max(segments) == 1
            else f"nothing is clipped (log_epsilon_P={config.log_epsilon_P:g}, "
            f"log_epsilon_R={config.log_epsilon_R:g})"
        )
    if moot and not clips:
        return f"note: humanline=true can change nothing in this run: {'; '.join(why)}"
    if moot and config.syncing == "humanline":
        return f"note: humanline=true only clips in this run, its syncing changes nothing: {why[0]}"
    return None


def moves(config: Config, segments: Sequence[int], exact: bool) -> bool:
    """Return whether humanline's syncing may change the reference of some step.

    False for any other ``sync_mode``, which does the same with ``humanline=false``."""
    if config.syncing != "humanline":
        return False
    k, planned = config.sync_freq, sum(segments)
    if not config.online or config.keeps_reference:
        return len(segments) > 1 or planned > k + 1
    if not exact:
        return max(segments) > 2 and planned > k + 1
    begin, changes_reference = 0, False
    for steps in segments:
        sync = (begin // k + 1) * k  # the first sync after the segment's first step
        changes_reference = changes_reference or sync + 1 < begin + steps
        begin += steps
    return changes_reference


def can_clip(config: Config, longest: int) -> bool:
    """Return whether a log-ratio may exceed a clipping bound in segments of at most ``longest`` steps."""
    if config.humanline_mode != "clip":
        return True
    bounds = (-config.log_epsilon_P, config.log_epsilon_R)
    if longest == 1:
        return config.reference_batch_size is not None and min(bounds) < ROUNDING
    return any(map(math.isfinite, bounds))


def _why_no_sync(config: Config, segments: Sequence[int]) -> str:
    if config.syncing != "humanline":
        return f"sync_mode={config.syncing} syncs without it too"
    k, planned = config.sync_freq, sum(segments)
    if config.online and not config.keeps_reference:
        return (
            f"rounds of at most {max(segments)} steps: with sync_freq={k} all steps of a round are compared "
            "with the policy that it began with"
        )
    return (
        f"with sync_freq={k} the reference first changes for step {k + 1}, counted from 0, and the run has "
        f"{planned}"
    )
