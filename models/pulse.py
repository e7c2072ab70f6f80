"""How fast the ranks' devices are beside each other.

Where weights are sharded, ranks wait for the slowest of them in every block, so the seconds of a step are the
same everywhere and do not say who is slow. So before each step every rank times work of its own that is the
same on all, and now and then the ranks compare the least that it took.
"""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass
from statistics import median_low

import torch

from models.distributed import World, gather_objects

EVERY = 10
"""Number of steps of which the least time is compared."""
SLOW = 1.1
"""A rank is slow where it takes more than this many times what the median rank does."""
IN_A_ROW = 3
"""Number of comparisons after which a rank that was the slowest, and slow, in all of them is named."""


@dataclass(frozen=True)
class Slowest:
    """The rank that took longest."""

    rank: int
    host: str
    times: float
    """its time, relative to that of the median rank"""

    @property
    def facts(self) -> dict[str, float | None]:
        """What a step's line says of it."""
        return {"slowest_rank": self.rank, "slowest_rank_times": self.times}


def slowest(timings: list[tuple[float, str]]) -> Slowest:
    """Return the slowest of the ranks' (seconds, host)."""
    middle = median_low(seconds for seconds, _ in timings)
    rank = max(range(len(timings)), key=lambda r: timings[r][0])
    return Slowest(rank, timings[rank][1], timings[rank][0] / middle)


class Pulse:
    """Times a few products of the same matrices, about a fifth of a millisecond of a large GPU, 16 MB there.
    The host does not wait for them: their time is read some steps later."""

    def __init__(self, world: World) -> None:
        self.world, self._timed = world, list[float]()
        self._under_way: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._beats = self._in_a_row = 0
        self._last = -1
        if world.size > 1:
            cuda = world.device.type == "cuda"
            size, self.products, dtype = (2048, 8, torch.bfloat16) if cuda else (256, 1, torch.float32)
            made = torch.Generator(world.device).manual_seed(0)
            self._matrix = torch.randn(size, size, generator=made, device=world.device, dtype=dtype)
            self._out = torch.empty_like(self._matrix)

    def beat(self) -> Slowest | None:
        """Time the work before a step. Return who was slowest in the last EVERY steps, once in so many; None
        otherwise, and on a single rank. Every rank calls this."""
        if self.world.size == 1:
            return None
        if self.world.device.type == "cuda":
            self._beat_on_gpu()
        else:
            start = time.perf_counter()
            self._multiply()
            self._timed.append(time.perf_counter() - start)
        self._beats += 1
        if self._beats % EVERY:
            return None
        least, self._timed = min(self._timed, default=0.0), []
        timings = gather_objects((least, socket.gethostname()))
        return slowest(timings) if all(seconds for seconds, _ in timings) else None

    def news(self, straggler: Slowest) -> str | None:
        """Return the message about a rank that is slow again and again, once; None if there is none."""
        again = straggler.times > SLOW and straggler.rank == self._last
        self._in_a_row = self._in_a_row + 1 if again else int(straggler.times > SLOW)
        self._last = straggler.rank
        if self._in_a_row != IN_A_ROW:
            return None
        return (
            f"rank {straggler.rank} ({straggler.host}) takes {straggler.times:.2f} times as long as "
            f"the median rank for the same products of matrices, for {IN_A_ROW * EVERY} steps: the others "
            "wait for it"
        )

    @torch.no_grad()
    def _multiply(self) -> None:
        for _ in range(self.products):
            torch.mm(self._matrix, self._matrix, out=self._out)

    def _beat_on_gpu(self) -> None:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        self._multiply()
        end.record()
        self._under_way.append((start, end))
        while self._under_way and self._under_way[0][1].query():
            start, end = self._under_way.pop(0)
            self._timed.append(start.elapsed_time(end) / 1000)
