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
    idle, unclipped = _why_no_sync(config, segments, exact), _why_no_clip(config, max(segments))
    if idle is None:
        return None
    if unclipped is not None:
        return f"note: humanline=true can change nothing in this run: {idle}; {unclipped}"
    if config.syncing == "humanline":
        return f"note: humanline=true only clips in this run, its syncing changes nothing: {idle}"
    return None


def _why_no_sync(config: Config, segments: Sequence[int], exact: bool) -> str | None:
    """Return why humanline's syncing changes the reference of no step; None where it may."""
    if config.syncing != "humanline":
        return f"sync_mode={config.syncing} syncs without it too"
    k, planned = config.sync_freq, sum(segments)
    rounds = config.online and not config.keeps_reference
    if not rounds:
        changes = len(segments) > 1 or planned > k + 1
    elif not exact:
        changes = max(segments) > 2 and planned > k + 1
    else:
        begins = [sum(segments[:i]) for i in range(len(segments))]
        # the first sync after a segment's first step
        changes = any((b // k + 1) * k + 1 < b + n for b, n in zip(begins, segments, strict=True))
    if changes:
        return None
    if rounds:
        return (
            f"rounds of at most {max(segments)} steps: with sync_freq={k} all steps of a round are compared "
            "with the policy that it began with"
        )
    return (
        f"with sync_freq={k} the reference first changes for step {k + 1}, counted from 0, and the run has "
        f"{planned}"
    )


def _why_no_clip(config: Config, longest: int) -> str | None:
    """Return why no log-ratio exceeds a clipping bound in segments of at most ``longest`` steps; None where
    one may."""
    bounds = (-config.log_epsilon_P, config.log_epsilon_R)
    if longest == 1:
        close = config.reference_batch_size is not None and min(bounds) < ROUNDING
        why = "every step is the first with its reference, so that all log-ratios are 0"
        return None if config.humanline_mode != "clip" or close else why
    if config.humanline_mode != "clip" or any(map(math.isfinite, bounds)):
        return None
    return (
        f"nothing is clipped (log_epsilon_P={config.log_epsilon_P:g}, log_epsilon_R={config.log_epsilon_R:g})"
    )
