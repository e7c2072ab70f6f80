"""How many tokens a microbatch may have, so that a step fits on the card: found by simulating a few sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from data.balance import row_tokens
from jobs.memory_neighbours import GIB
from jobs.memory_parts import Card, Situation, peak
from jobs.memory_simulation import Answer, Question

Ask = Callable[[Question], Answer]

PROBE = 8192
"""Tokens of the smaller of the two microbatches whose memory says how it grows. Small ones are simulated in
seconds, a whole batch in a minute."""
SPARE = 1.1
"""A batch that would fit with so many times its tokens is not simulated whole."""
RETREAT, TRIES = 0.9, 4
"""An estimate that turns out not to fit is lowered by this factor, so many times at most."""


def with_tokens(asked: Question, tokens: int) -> Question:
    """The same question of a run that has ``model.microbatch_tokens=tokens``."""
    model = replace(asked.config.model, microbatch_tokens=tokens, gradient_accumulation_steps=1)
    return replace(asked, config=replace(asked.config, model=model))


def step_size(answer: Answer) -> float:
    """GiB of a training step at its fullest moment."""
    return sum(peak(answer, evaluation=False).values()) / GIB


def fitting_tokens(asked: Question, longest: int, whole: int, room: float, ask: Ask) -> int | None:
    """Return the ``model.microbatch_tokens`` under which a step takes at most ``room`` GiB. None: the batch
    fits in one pass, or not even its longest example fits.

    ``longest``: tokens of the longest example, which a microbatch must be able to hold. ``whole``: tokens of
    the widest microbatch where a batch goes in one pass. Memory grows about linearly with tokens: two small
    microbatches give the line, and a size that fits by the line is simulated before it is returned.
    """
    small = max(longest, min(PROBE, whole // 4))
    if small >= whole:
        return None
    first, second = ask(with_tokens(asked, small)), ask(with_tokens(asked, min(2 * small, whole)))
    slope = (step_size(second) - step_size(first)) / max(second.tokens - first.tokens, 1)
    most = whole if slope <= 0 else first.tokens + (room - step_size(first)) / slope
    if slope > 0 and most >= whole * SPARE:
        return None
    if most >= whole:
        if step_size(ask(asked)) <= room:
            return None
        most = whole * RETREAT
    least = small if step_size(first) <= room else longest
    return first_that_fits(asked, most, least, room, ask)


def first_that_fits(asked: Question, most: float, least: int, room: float, ask: Ask) -> int | None:
    """Return the first number of tokens whose simulated step fits, from ``most`` down to ``least``; None
    where ``least`` does not fit either."""
    for _ in range(TRIES):
        tokens = in_thousands(most)
        if tokens <= least:
            break
        if step_size(ask(with_tokens(asked, tokens))) <= room:
            return tokens
        most *= RETREAT
    return least if step_size(ask(with_tokens(asked, least))) <= room else None


def in_thousands(tokens: float) -> int:
    """Rounded down to whole thousands, where there are some."""
    return int(tokens) // 1000 * 1000 if tokens >= 1000 else int(tokens)


def what_fits(asked: Question, given: Answer, card: Card, step: Situation, ask: Ask) -> str:
    """How many tokens a microbatch may have: of a step that fits, counting all that may grow with them; of
    one that does not, from a second answer for half as many."""
    longest = max(map(row_tokens, asked.batch))
    spare = card.room - step.total
    if spare >= 0:
        grows = sum(size for part, size in step.parts.items() if part in ("activations", "work", "head"))
        tokens = given.tokens * (1 + spare / grows)
        fits = f"a step would fit with microbatches of {in_thousands(tokens):,} tokens"
        return fits + stays(asked, given, spare)
    less = given.tokens // 2
    if less >= longest:
        half = ask(replace(with_tokens(asked, less), held_out=[]))
        slope = (step_size(given) - step_size(half)) / max(given.tokens - half.tokens, 1)
        if slope > 0 and (tokens := given.tokens + spare / slope) >= longest:
            return f"a step would fit with model.microbatch_tokens={in_thousands(tokens)}"
    checkpointing = (
        "" if asked.config.model.activation_checkpointing is True else "model.activation_checkpointing=true, "
    )
    return (
        f"not even microbatches of one example fit, the longest of which has {longest:,} tokens: "
        f"{checkpointing}a lower model.max_length, or more ranks would help"
    )


def stays(asked: Question, given: Answer, spare: float) -> str:
    """Whether every layer could stay gathered until its backward: there is room for the whole model as it is
    computed, which is more than its layers."""
    whole = given.parameters * getattr(torch, asked.config.model.dtype).itemsize / GIB
    if asked.ranks == 1 or not asked.config.model.reshard_after_forward or spare < whole:
        return ""
    return f", or with model.reshard_after_forward=false ({whole:.1f} GiB more at most)"
