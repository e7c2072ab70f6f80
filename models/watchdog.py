"""Detection of ranks that the others wait for without end."""

from __future__ import annotations

import atexit
import json
import math
import os
import socket
import threading
import time
from typing import Any

from models.distributed import World, launchers_store

INTERVAL = 10.0
"""Seconds between two signs of life of a rank."""


class Watchdog:
    """Prints which ranks the others wait for, and which of them give no sign of life.

    Every rank marks what it is about to do. A thread of each writes its mark and the time to the
    launcher's store, and reads those of all ranks; a stopped process writes nothing more. When no rank has
    marked anything new for ``seconds``, or for four intervals where a rank gives no sign of life, the first
    live rank prints which ranks are waited for. Nothing here makes a step wait.
    """

    def __init__(self, world: World, seconds: float) -> None:
        self.world, self.seconds = world, seconds
        self._interval = min(seconds / 4, INTERVAL)
        self._store = launchers_store("watchdog")
        self._stop, self._mark = threading.Event(), "has begun"
        self._signs: list[tuple[Any, ...]] = [(-1.0, "has not begun", "has not begun", math.inf)] * world.size
        """Of each rank its last sign's time there, process and mark, and when it was seen here, seconds."""
        self._thread = threading.Thread(target=self._watch, daemon=True)
        if world.size > 1:
            atexit.register(self.close)  # a thread inside the store would end the interpreter by a signal
            self._thread.start()

    def mark(self, doing: str) -> None:
        """Set what this rank does from now on: a step's number and a word."""
        self._mark = doing

    def close(self) -> None:
        self._stop.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(1.0)

    def _watch(self) -> None:
        process, tick = f"process {os.getpid()} on {socket.gethostname()}", time.monotonic()
        last, since, named, reported = list[str](), tick, set[int](), -math.inf
        while not self._stop.wait(self._interval):
            try:
                self._exchange(process)
            except RuntimeError:  # the store ended with the ranks, or its holder was silent for too long
                continue
            now, marks = time.monotonic(), [mark for *_, mark, _ in self._signs]
            stopped, tick = now - tick > 3 * self._interval, now
            if stopped:  # this process itself, or the store: begin anew
                self._signs = [(*sign, now) for *sign, _ in self._signs]
            if stopped or marks != last:
                last, since, named = marks, now, set()
            ages = {rank: now - seen for rank, (*_, seen) in enumerate(self._signs)}
            silent = {r: self._signs[r][1] for r, age in ages.items() if age > 3 * self._interval}
            waited = now - since > (4 * self._interval if silent else self.seconds)
            news = bool(silent.keys() - named) or now - reported > self.seconds
            if waited and news and min(ages.keys() - silent.keys()) == self.world.rank:
                named, reported = set(silent), now
                print(slow_ranks(marks, now - since, silent), flush=True)

    def _exchange(self, process: str) -> None:
        """Give a sign of life and read those of the ranks that have begun."""
        names = [str(rank) for rank in range(self.world.size)]
        self._store.set(names[self.world.rank], json.dumps([time.monotonic(), process, self._mark]))
        begun = [name for name in names if self._store.check([name])]
        for name, text in zip(begun, self._store.multi_get(begun), strict=True):
            sign = tuple(json.loads(text))
            if sign != self._signs[int(name)][:3]:
                self._signs[int(name)] = (*sign, time.monotonic())


def slow_ranks(marks: list[str], seconds: float, silent: dict[int, str] | None = None) -> str:
    """Return the message about ``marks``, one per rank. It names the ranks that give no sign of life
    (``silent``: rank -> process), else those that are not where most ranks are."""
    start = f"no rank has moved for {seconds:.0f} s; "
    if silent:
        gone = "which gives no sign of life: stopped, or its machine is gone"
        named = [f"rank {rank} ({whose}), {gone}; last at: {marks[rank]}" for rank, whose in silent.items()]
        return f"{start}waited for: {'; '.join(named)}"
    usual = max(set(marks), key=marks.count)
    others = [f"rank {rank}: {mark}" for rank, mark in enumerate(marks) if mark != usual]
    if not others:
        return f"{start}all are at: {usual} (a collective hangs, or a device does)"
    return f"{start}most are at: {usual}; waited for: {'; '.join(others)}"
