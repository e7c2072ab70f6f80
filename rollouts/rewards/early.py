"""Scoring that begins while a round is still being sampled.

Rewards that wait for something else (a process, a judge, a server) do it in tasks that know nothing of
each other: ``Tasks``. A task whose completions have all been sampled is begun at once (``Arrivals``), with
the very completions that it would have later. ``score`` then takes the results that are there, so what is
scored together, and with what result, does not depend on when it was begun.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, Protocol, TypeVar

from data.types import Prompt

T = TypeVar("T")
V = TypeVar("V")


class Tasks(Generic[T, V]):
    """``run`` of tasks by up to ``threads`` threads, which live until ``close``. A task is known by its
    ``repr``: one that was begun and is asked for is not run again."""

    def __init__(self, run: Callable[[T], V], threads: int, opened: Callable[[], None] | None = None) -> None:
        """``opened`` is called before the first of the tasks that are under way together."""
        self._run, self._opened = run, opened
        self._threads = ThreadPoolExecutor(threads)
        self._begun: defaultdict[str, deque[Future[V]]] = defaultdict(deque)
        self._under_way = 0
        self._lock = threading.Lock()

    def begin(self, task: T) -> None:
        """What it raises, ``map`` raises."""
        future = self._submit(task)
        with self._lock:
            self._begun[repr(task)].append(future)

    def map(self, tasks: Sequence[T]) -> list[V]:
        """The result of each task, in order. Raises what the first of them raises; those that have not begun
        then are not run."""
        futures = [self._taken(task) or self._submit(task) for task in tasks]
        try:
            return [future.result() for future in futures]
        except BaseException:
            for future in futures:
                future.cancel()
            raise

    def close(self) -> None:
        """What has not begun is not run; what has is not waited for."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _taken(self, task: T) -> Future[V] | None:
        with self._lock:
            if not self._begun or (key := repr(task)) not in self._begun:
                return None
            found = self._begun[key].popleft()
            if not self._begun[key]:
                del self._begun[key]
        return found

    def _submit(self, task: T) -> Future[V]:
        with self._lock:
            if self._under_way == 0 and self._opened is not None:
                self._opened()
            self._under_way += 1
        future = self._threads.submit(self._run, task)
        future.add_done_callback(self._ended)
        return future

    def _ended(self, future: Future[V]) -> None:
        with self._lock:
            self._under_way -= 1


class Begins(Protocol):
    """A scorer, or a part of one, that can begin before it is asked."""

    chunk: int
    """Completions that are scored together: those from a multiple of it on."""

    def begin(self, prompts: Sequence[Prompt], completions: Sequence[str]) -> None:
        """Begin to score one chunk. ``score`` of more takes its result."""


class Arrivals:
    """The completions of a round as they are sampled, in any order. ``count``: how many there will be."""

    def __init__(self, scorers: Sequence[Begins], count: int) -> None:
        self.scorers = list(scorers)
        self._rows: list[tuple[Prompt, str] | None] = [None] * count
        self._done: set[tuple[int, int]] = set()

    def put(self, first: int, rows: Sequence[tuple[Prompt, str]]) -> None:
        """What was asked and answered at the places from ``first`` on. Chunks that are whole now are begun,
        each once."""
        self._rows[first : first + len(rows)] = rows
        for which, scorer in enumerate(self.scorers):
            for at in range(first // scorer.chunk * scorer.chunk, first + len(rows), scorer.chunk):
                whole = [row for row in self._rows[at : at + scorer.chunk] if row is not None]
                if len(whole) == len(self._rows[at : at + scorer.chunk]) and (which, at) not in self._done:
                    self._done.add((which, at))
                    scorer.begin([prompt for prompt, _ in whole], [text for _, text in whole])


def parts_that_begin(scorer: Any) -> list[Begins]:
    """Of a scorer, or of what it is made of, those that can begin early; none of a model, which shares its
    device with what samples."""
    parts = getattr(scorer, "parts", None)
    if parts is not None:
        return [found for part in parts.values() for found in parts_that_begin(part)]
    return [scorer] if hasattr(scorer, "begin") else []
