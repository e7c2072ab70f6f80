"""Whether humanline can change anything of a run: said at the start, since two runs that are the same by
construction compare nothing.

Humanline does two things. It syncs: at steps 0, k, 2k … the reference becomes the policy before the update
(``trainers.syncing``), and the steps behind see it up to the next sync, or to the end of their segment: a
round starts with the policy as its reference anyway, unless ``rounds.reset_reference`` is false. So the sync
of step t changes a later step of its segment only if the segment began before t and goes on behind t: all of
a segment of two steps sees the policy that it began with. And it clips, which changes nothing where a bound
is infinite, or where each step is the first of its segment, whose log-ratios are 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from config.schema import Config

ROUNDING = 0.01
"""nats: bounds nearer to 0 may bind on rounding alone, where policy and reference are computed in other
batches."""


def notice(config: Config, segments: Sequence[int], exact: bool) -> str | None:
    """The sentence, or None where humanline is off or can change something.

    ``segments``: the steps of each segment as planned; ``exact``: whether they will be as planned, or may be
    fewer.
    """
    if not config.humanline or not segments:
        return None
    if config.keeps_reference:  # rounds are one stretch to it
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
    """Whether syncing because of humanline may change what some step is compared with. Another ``sync_mode``
    is the same with ``humanline=false``."""
    if config.syncing != "humanline":
        return False
    k, planned = config.sync_freq, sum(segments)
    if not config.online or config.keeps_reference:
        return len(segments) > 1 or planned > k + 1
    if not exact:
        return max(segments) > 2 and planned > k + 1
    begin, found = 0, False
    for steps in segments:
        sync = (begin // k + 1) * k  # the first one behind the segment's first step
        found = found or sync + 1 < begin + steps
        begin += steps
    return found


def can_clip(config: Config, longest: int) -> bool:
    """Whether a log-ratio may lie beyond a bound in segments of at most ``longest`` steps."""
    if config.humanline_mode == "sample":
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
