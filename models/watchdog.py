"""Detection of ranks that the others wait for without end."""

from __future__ import annotations

import atexit
import json
import math
import os
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

from models.distributed import World, launchers_store

INTERVAL = 10.0
"""Seconds between two signs of life of a rank."""
STORE = -1
"""Stands for the holder of the store among the ranks that are gone."""


class Watchdog:
    """Prints which ranks the others wait for, and which of them give no sign of life.

    Every rank marks what it is about to do. A thread of each rank writes its mark and a growing number to the
    launcher's store, and reads those of all ranks; a stopped process writes nothing more. When no rank has
    marked anything new for ``seconds``, the first live rank prints which ranks are waited for. Where a rank
    gives no sign of life it does so after four intervals, and where the store itself does not answer (without
    a launcher rank 0 holds it), every rank prints that as soon. Nothing here makes a step wait.
    """

    def __init__(self, world: World, seconds: float) -> None:
        self.world, self.seconds = world, seconds
        self._interval = min(seconds / 4, INTERVAL)
        self._store = launchers_store("watchdog")
        self._stop = threading.Event()
        self._mark = "has begun"
        self._signs = [Sign() for _ in range(world.size)]
        self._heard = time.monotonic()
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._listen, self._watch)]
        if world.size > 1:
            atexit.register(self.close)  # a thread inside the store would end the interpreter by a signal
            for thread in self._threads:
                thread.start()

    def mark(self, doing: str) -> None:
        """Set what this rank does from now on: a step's number and a word."""
        self._mark = doing

    def close(self) -> None:
        self._stop.set()
        for thread in self._threads:
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(1.0)

    def _listen(self) -> None:
        """Give signs of life and read those of the other ranks. A call of the store may hang for as long as
        the process that holds it does."""
        names, beat = [str(rank) for rank in range(self.world.size)], 0
        process = f"process {os.getpid()} on {socket.gethostname()}"
        while not self._stop.wait(self._interval):
            beat += 1
            try:
                self._store.set(names[self.world.rank], json.dumps([beat, process, self._mark]))
                begun = names if self._store.check(names) else [n for n in names if self._store.check([n])]
                texts = self._store.multi_get(begun)
            except RuntimeError:  # the store ended with the ranks, or its holder was silent for too long
                continue
            self._heard = time.monotonic()
            for name, text in zip(begun, texts, strict=True):
                self._signs[int(name)].take(*json.loads(text))

    def _watch(self) -> None:
        tick = since = time.monotonic()
        told, named = -math.inf, set[int]()
        last: list[str] = []
        dead = 4 * self._interval  # a call may hold the interpreter, and with it the signs, for some time
        while not self._stop.wait(self._interval):
            now, marks = time.monotonic(), [sign.mark for sign in self._signs]
            if now - tick > 3 * self._interval:  # this process itself was stopped: begin anew
                self._heard = now
            deaf = now - self._heard
            if marks != last or now - tick > 3 * self._interval or deaf > 2 * self._interval:
                last, since = marks, now
                named &= {STORE} if deaf > 2 * self._interval else set()
            tick = now
            silent = {r: sign for r, sign in enumerate(self._signs) if sign.age(now) > 3 * self._interval}
            gone = {STORE} if deaf > dead else set(silent)
            stands = deaf > dead or now - since > (dead if silent else self.seconds)
            if not stands or not (gone - named or now - told > self.seconds):
                continue
            told, named = now, gone
            if deaf > dead:
                print(silent_store(self.world.rank, deaf), flush=True)
            elif min(set(range(self.world.size)) - set(silent), default=0) == self.world.rank:
                print(slow_ranks(marks, now - since, silent), flush=True)


@dataclass
class Sign:
    """The last sign of life of a rank."""

    beat: int = -1
    process: str = "has not begun"
    mark: str = "has not begun"
    changed: float | None = None
    """When this process saw the rank's last sign of life, on its own clock, seconds; None: never."""

    def take(self, beat: int, process: str, mark: str) -> None:
        if beat != self.beat:
            self.beat, self.process, self.mark, self.changed = beat, process, mark, time.monotonic()

    def age(self, now: float) -> float:
        """Return the seconds since the last sign of life; 0 for a rank that has not begun."""
        return 0.0 if self.changed is None else now - self.changed


def slow_ranks(marks: list[str], seconds: float, silent: Mapping[int, Sign] | None = None) -> str:
    """Return the message about ``marks``, one per rank. It names the ranks that give no sign of life
    (``silent``), else those that are not where most ranks are."""
    start = f"no rank has moved for {seconds:.0f} s; "
    if silent:
        return (
            start
            + "waited for: "
            + "; ".join(
                f"rank {rank} ({sign.process}), which gives no sign of life: stopped, or its machine is "
                f"gone; last at: {sign.mark}"
                for rank, sign in silent.items()
            )
        )
    usual = max(set(marks), key=marks.count)
    others = [f"rank {rank}: {mark}" for rank, mark in enumerate(marks) if mark != usual]
    return start + (
        f"most are at: {usual}; waited for: {'; '.join(others)}"
        if others
        else f"all are at: {usual} (a collective hangs, or a device does)"
    )


def silent_store(rank: int, seconds: float) -> str:
    """Return the message of ``rank`` about a store that has not answered for ``seconds``."""
    launched = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    holder = f"{'the launcher' if launched else 'rank 0'} ({os.environ.get('MASTER_ADDR', 'this machine')})"
    return f"rank {rank}: {holder} has not answered for {seconds:.0f} s: stopped, or its machine is gone"
