"""Work that rank 0 does alone once a round, as plain code without collectives, while the other ranks wait and
help on request. They help to sample, to gather weights and to score.

Every rank declares alike and beforehand, when samplers and rewards are made, what it can be asked for.
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
    """A rank could not do its share; the message says which rank and why."""


class Ranks:
    """The ranks of a run, for work that is done once a round."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._duties: list[Callable[[Any], Any]] = []
        self._helped = False

    def run_on_main(self, work: Callable[[], T]) -> T:
        """Return on every rank what rank 0's ``work`` returns, or raise what it raises. ``work`` may call the
        functions that ``together`` and ``dealt`` returned. Every rank calls this."""
        if not self.world.is_main:
            return outcome(self._help())  # type: ignore[no-any-return]
        before, self._helped = self._helped, True
        done = attempt(work)
        self._helped = before
        if self.world.size > 1:
            from_main((None, done))
        return outcome(done)  # type: ignore[no-any-return]

    def _help(self) -> Any:
        """Do what rank 0 asks for until its work is done; return the outcome of that work."""
        while True:
            duty, value = from_main(None)
            if duty is None:
                return value
            self._duties[duty](value)

    def together(self, work: Callable[[T], R]) -> Callable[[T], R]:
        """Return a function that runs ``work`` on every rank when rank 0 calls it inside ``run_on_main``;
        ``work`` may use collectives. What ``work`` raises on another rank ends that rank. Every rank calls
        this alike, and in the same order."""
        duty = len(self._duties)
        self._duties.append(work)

        def ask(value: T) -> R:
            if self.world.size > 1:
                assert self._helped, "the other ranks do not listen outside of run_on_main"
                from_main((duty, value))
            return work(value)

        return ask

    def dealt(self, work: Callable[[T], R]) -> Callable[[Sequence[T]], list[R]]:
        """Return a function that applies ``work`` to many items, a share of them on every rank, and returns
        the results in the items' order. ``work`` uses no collectives. Every rank calls this alike, as
        ``together``.

        With several ranks, what ``work`` raises on any of them is raised once all are done: a UserError as it
        is, anything else as a ShareError.
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
        """Do as ``attempt``, with an error that can be sent to other ranks: not every exception can."""
        try:
            return work(), None
        except UserError as error:
            return None, error
        except Exception as error:
            traceback.print_exc()
            words = " ".join(f"{type(error).__name__}: {error}".split())
            return None, ShareError(f"rank {self.world.rank} could not do its share: {words}")


def alone(work: Callable[[T], R]) -> Callable[[Sequence[T]], list[R]]:
    """Return the function that ``Ranks.dealt`` returns, for this process alone."""
    return lambda items: [work(item) for item in items]


def attempt(work: Callable[[], T]) -> tuple[T | None, BaseException | None]:
    """Return (the result of ``work``, the exception that it raised). The other ranks must be told of an
    exception: they would wait for ever if rank 0 left."""
    try:
        return work(), None
    except BaseException as error:
        return None, error


def outcome(done: tuple[Any, BaseException | None]) -> Any:
    """Return the result in ``done``, the output of ``attempt``, or raise its exception."""
    value, error = done
    if error is not None:
        raise error
    return value
