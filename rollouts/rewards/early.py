"""Scoring that begins while a round is still being sampled.

Rewards that wait for something else (a process, a judge, a server) work in tasks that are independent of each
other (``Tasks``). A task begins as soon as all of its completions have been sampled (``Arrivals``), and it
gets exactly the completions that it would get later. ``score`` then takes the results that are ready. So
neither the composition of a task nor its result depends on when the task begins.
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
    """Runs tasks with ``run`` in up to ``threads`` threads, which live until ``close``. A task is identified
    by its ``repr``. A task that has been begun is not run again when ``map`` asks for it."""

    def __init__(self, run: Callable[[T], V], threads: int, opened: Callable[[], None] | None = None) -> None:
        """``opened`` is called before a task starts while no other task is under way."""
        self._run, self._opened = run, opened
        self._threads = ThreadPoolExecutor(threads)
        self._begun: defaultdict[str, deque[Future[V]]] = defaultdict(deque)
        self._under_way = 0
        self._lock = threading.Lock()

    def begin(self, task: T) -> None:
        """Start ``task``. An exception that it raises is raised by ``map``."""
        future = self._submit(task)
        with self._lock:
            self._begun[repr(task)].append(future)

    def map(self, tasks: Sequence[T]) -> list[V]:
        """Return the result of each task, in order. If tasks fail, the exception of the first of them in this
        order is raised, and tasks that have not begun by then are not run."""
        futures = [self._taken(task) or self._submit(task) for task in tasks]
        try:
            return [future.result() for future in futures]
        except BaseException:
            for future in futures:
                future.cancel()
            raise

    def close(self) -> None:
        """Cancel the tasks that have not begun, without waiting for those that have."""
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
    """A scorer, or a part of one, that can begin to score before ``score`` is called."""

    chunk: int
    """Number of completions that are scored together. Chunks start at multiples of it."""

    def begin(self, prompts: Sequence[Prompt], completions: Sequence[str]) -> None:
        """Begin to score one chunk. A later ``score`` of completions that include this chunk takes its
        result."""


class Arrivals:
    """The completions of a round, collected as they are sampled, in any order. ``count``: how many there will
    be."""

    def __init__(self, scorers: Sequence[Begins], count: int) -> None:
        self.scorers = list(scorers)
        self._rows: list[tuple[Prompt, str] | None] = [None] * count
        self._done: set[tuple[int, int]] = set()

    def put(self, first: int, rows: Sequence[tuple[Prompt, str]]) -> None:
        """Store ``rows``, pairs of prompt and completion, at the positions from ``first`` on. Chunks that are
        now complete begin to be scored, each once."""
        self._rows[first : first + len(rows)] = rows
        for which, scorer in enumerate(self.scorers):
            for at in range(first // scorer.chunk * scorer.chunk, first + len(rows), scorer.chunk):
                whole = [row for row in self._rows[at : at + scorer.chunk] if row is not None]
                if len(whole) == len(self._rows[at : at + scorer.chunk]) and (which, at) not in self._done:
                    self._done.add((which, at))
                    scorer.begin([prompt for prompt, _ in whole], [text for _, text in whole])


def parts_that_begin(scorer: Any) -> list[Begins]:
    """Return those parts of a scorer that can begin early, which may be the scorer itself. A model cannot,
    because it shares its device with the sampler."""
    parts = getattr(scorer, "parts", None)
    if parts is not None:
        return [found for part in parts.values() for found in parts_that_begin(part)]
    return [scorer] if hasattr(scorer, "begin") else []
