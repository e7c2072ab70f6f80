"""Fair timing of A against B on a machine that is not idle, and the memory of a process."""

from __future__ import annotations

import gc
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers

ROOT = Path(__file__).parent.parent
Work = Callable[[], object]
Variant = Callable[[], list[Work]]
"""Prepares everything (not timed) and returns the timed work, in pieces that are done one after the other."""


@dataclass(frozen=True)
class Sample:
    """One timed run, seconds. CPU time is that of all threads of this process; on a shared machine it is more
    reliable than wall time."""

    wall: float
    cpu: float

    def __add__(self, other: Sample) -> Sample:
        return Sample(self.wall + other.wall, self.cpu + other.cpu)


def timed(work: Work) -> Sample:
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return Sample(time.perf_counter() - wall, time.process_time() - cpu)


def alternate(variants: dict[str, Variant], rounds: int) -> dict[str, list[Sample]]:
    """Return ``rounds`` samples of each variant, each the sum of its pieces. The first pieces of all variants
    are timed in turn, then the second ones in the other order, and so on: the shorter the pieces, the more
    equal the load from the rest of the machine. Raises ValueError unless all variants have the same number of
    pieces."""
    samples: dict[str, list[Sample]] = {name: [] for name in variants}
    for i in range(rounds):
        sums = _in_turn(variants, i)
        gc.collect()  # models in circles of references, before the next round makes its own
        for name, sample in sums.items():
            samples[name].append(sample)
    return samples


def _in_turn(variants: dict[str, Variant], i: int) -> dict[str, Sample]:
    works = {name: variant() for name, variant in variants.items()}
    sums = dict.fromkeys(variants, Sample(0.0, 0.0))
    for j, pieces in enumerate(zip(*works.values(), strict=True)):
        turn = list(zip(variants, pieces, strict=True))
        for name, piece in turn if (i + j) % 2 == 0 else reversed(turn):
            sums[name] += timed(piece)
    return sums


@dataclass(frozen=True)
class Spread:
    """Median, minimum and maximum of several measurements."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        values = sorted(values)
        return cls(statistics.median(values), values[0], values[-1])

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f} to {self.high:.3f})"


def ratio(a: list[Sample], b: list[Sample], clock: str = "cpu") -> Spread:
    """Return the ratio of a's time to b's, round by round: both times of a quotient were measured within the
    same minute."""
    times = {"cpu": lambda s: s.cpu, "wall": lambda s: s.wall}[clock]
    return Spread.of(times(x) / times(y) for x, y in zip(a, b, strict=True))


def peak_rss() -> int:
    """Return the peak memory of this process, bytes. Unlike getrusage's, it does not include the parent's
    from before exec."""
    line = next(
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")
    )
    return int(line.split()[1]) * 1024


def machine() -> str:
    """Return the conditions of a measurement: processor, cores, load, threads and versions."""
    cpu = next(
        (
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.processor(),
    )
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else cpu
    return (
        f"{device}; {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {torch.get_num_threads()} "
        "thread(s); Python "
        f"{platform.python_version()}, torch {torch.__version__}, transformers {transformers.__version__}"
    )
