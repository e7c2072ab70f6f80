"""Rank 0 makes a round alone, as plain code without collectives; the other ranks wait, and help when it asks:
to sample, to gather weights, to score.

What they can be asked for is said beforehand, by every rank alike, when samplers and rewards are made.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from common.errors import StoppedError, UserError
from models.distributed import World, from_main, gather_objects

T = TypeVar("T")
R = TypeVar("R")


class ShareError(StoppedError):
    """A rank could not do its share; the message says which and why."""


class Ranks:
    """The ranks of a run, for what is done once a round."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._duties: list[Callable[[Any], Any]] = []
        self._helped = False

    def run_on_main(self, work: Callable[[], T]) -> T:
        """What rank 0's ``work`` gives, or raises, on every rank; ``work`` may call what ``together`` and
        ``dealt`` gave. Every rank calls it."""
        if not self.world.is_main:
            return outcome(self._help())  # type: ignore[no-any-return]
        before, self._helped = self._helped, True
        done = attempt(work)
        self._helped = before
        if self.world.size > 1:
            from_main((None, done))
        return outcome(done)  # type: ignore[no-any-return]

    def _help(self) -> Any:
        """Do what rank 0 asks for, until it has done its work."""
        while True:
            duty, value = from_main(None)
            if duty is None:
                return value
            self._duties[duty](value)

    def together(self, work: Callable[[T], R]) -> Callable[[T], R]:
        """``work`` done by every rank when rank 0 asks for it, inside ``run_on_main``; it may use
        collectives. What it raises on another rank ends that rank. Every rank calls this alike, and in the
        same order."""
        duty = len(self._duties)
        self._duties.append(work)

        def ask(value: T) -> R:
            if self.world.size > 1:
                assert self._helped, "the other ranks do not listen outside of run_on_main"
                from_main((duty, value))
            return work(value)

        return ask

    def dealt(self, work: Callable[[T], R]) -> Callable[[Sequence[T]], list[R]]:
        """``work`` of each of many items, every rank a share of them; the results in the items' order.
        ``work`` uses no collectives. Every rank calls this alike, as ``together``.

        What ``work`` raises on any of several ranks is raised once all are done: a UserError as it is,
        anything else as a ShareError.
        """
        rank, size = self.world.rank, self.world.size
        if size == 1:
            return alone(work)

        def share(items: Sequence[T]) -> list[tuple[list[R] | None, Exception | None]]:
            mine = items[rank::size]
            return gather_objects(self._tried(lambda: [work(item) for item in mine]))

        on_every_rank = self.together(share)

        def each(items: Sequence[T]) -> list[R]:
            parts: list[list[R]] = [outcome(done) for done in on_every_rank(items)]
            return [parts[i % size][i // size] for i in range(len(items))]

        return each

    def _tried(self, work: Callable[[], R]) -> tuple[R | None, Exception | None]:
        """As ``attempt``, with an error that can be told to other ranks: not every exception can be sent."""
        try:
            return work(), None
        except UserError as error:
            return None, error
        except Exception as error:
            traceback.print_exc()
            words = " ".join(f"{type(error).__name__}: {error}".split())
            return None, ShareError(f"rank {self.world.rank} could not do its share: {words}")


def alone(work: Callable[[T], R]) -> Callable[[Sequence[T]], list[R]]:
    """As ``Ranks.dealt``, by this process."""
    return lambda items: [work(item) for item in items]


def attempt(work: Callable[[], T]) -> tuple[T | None, BaseException | None]:
    """(what ``work`` gives, what it raises): to be told to other ranks, which would wait for ever if rank 0
    just left."""
    try:
        return work(), None
    except BaseException as error:
        return None, error


def outcome(done: tuple[Any, BaseException | None]) -> Any:
    """Give or raise what ``attempt`` has."""
    value, error = done
    if error is not None:
        raise error
    return value
