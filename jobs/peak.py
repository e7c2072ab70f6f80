"""What a run's memory was, beside what was planned: the line after its widest microbatch, the summary's, and
the message of a run that ran out of it."""

from __future__ import annotations

import math
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from jobs.memory import MemoryPlan
from jobs.situations import GIB
from models.distributed import World, gather_objects

NEAR = 0.9
"""Share of the widest planned microbatch from which on one counts as it."""
FREE = 0.2
"""Share of a card that is worth using."""
LESS = 2 / 3
"""Share of a microbatch's tokens that is left of one that was too large."""


def measured(world: World, plan: MemoryPlan) -> dict[str, Any]:
    """Return the most that the fullest rank has held so far, in words beside what was planned, and as GiB; a
    collective."""
    if world.device.type == "cuda":
        own, what = torch.cuda.max_memory_allocated(world.device) / GIB, "tensors on the GPU"
    else:
        own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB  # Linux counts in KiB
        what = "the whole process"
    most = max(gather_objects(own))
    beside = ""
    if (world.device.type == "cuda") == (plan.card is not None):
        beside = f", {most / plan.predicted:.0%} of what was predicted"
    return {"measured": f"{most:.2f} GiB ({what}{beside})", "measured_gib": most}


class PeakLine:
    """Says once, after the first update that had the widest microbatch, what the fullest rank held, and where
    a fifth of its GPU is free, the number that would use it."""

    def __init__(self, plan: MemoryPlan, world: World, say: Callable[[str], None]) -> None:
        self._plan, self._world, self._say = plan, world, say
        self._waits = True

    def after_update(self, widest: int) -> None:
        """``widest``: tokens of the update's widest microbatch on any rank. Every rank calls it alike."""
        if not self._waits or widest < NEAR * self._plan.load.tokens:
            return
        self._waits = False
        found = measured(self._world, self._plan)
        self._say(f"memory so far: {found['measured']}{self._to_use(found['measured_gib'], widest)}")

    def _to_use(self, taken: float, widest: int) -> str:
        """Return the number of tokens with which microbatches would use what is free of the GPU."""
        plan, step = self._plan, self._plan.situations[0]
        if plan.card is None or not plan.load.several:
            return ""
        outside = step.total - step.tensors
        free = plan.card.room - outside - taken
        growing = taken - (step.tensors - step.variable)
        if free < FREE * plan.card.memory or growing <= 0:
            return ""
        tokens = math.floor(widest * (1 + free / growing)) // 1000 * 1000
        return f"; {free:.1f} GiB are free: model.microbatch_tokens={tokens} would use them"


class ShortOfMemoryError(RuntimeError):
    """A rank ran out of memory; the message has the numbers to type."""


@contextmanager
def short_of_memory(plan: MemoryPlan, eval_batch_size: int) -> Iterator[None]:
    """Raise ShortOfMemoryError with what to type in place of torch's error of a GPU or a CPU without room."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and "can't allocate memory" not in str(error):
            raise
        tokens = max(plan.least, math.floor(LESS * plan.load.tokens) // 1000 * 1000)
        words = f"model.microbatch_tokens={tokens} model.microbatches=1"
        if tokens >= plan.load.tokens:
            words = "model.activation_checkpointing=true, or a lower model.max_length"
        smaller = f"; in an evaluation, model.eval_batch_size={max(1, eval_batch_size // 2)}"
        first = str(error).strip().partition("\n")[0]
        raise ShortOfMemoryError(f"out of memory ({first}): in a step, use {words}{smaller}") from error
