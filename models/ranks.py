"""Work that rank 0 does alone once a round, as plain code without collectives, while the other ranks wait and
help on request. They help to sample, to gather weights and to score.

Every rank declares alike and beforehand, when samplers and rewards are made, what it can be asked for.
"""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

from common.errors import Requeue, StoppedError, UserError
from common.progress import by_itself, pause
from common.secrets import scrub_text
from models.distributed import World, from_main, gather_objects, launchers_store

T = TypeVar("T")
R = TypeVar("R")


_ENDED = "ended"
"""Key, in the launcher's store, of the message of a rank that ended while others waited for it."""
_TOLD = "the other ranks are told"


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
        functions that ``collective`` and ``map_over_ranks`` returned. Every rank calls this."""
        if not self.world.is_main:
            return unwrap(self._help())  # type: ignore[no-any-return]
        before, self._helped = self._helped, True
        with by_itself():
            done = catch(work)
        self._helped = before
        if self.world.size > 1:
            self._refuse_if_one_has_ended()
            from_main((None, done))
        return unwrap(done)  # type: ignore[no-any-return]

    def _help(self) -> Any:
        """Do what rank 0 asks for until its work is done; return the outcome of that work."""
        while True:
            try:
                duty, value = from_main(None)
            except RuntimeError:
                self._refuse_if_one_has_ended()
                raise
            if duty is None:
                return value
            # Where it stops, as all ranks then do, rank 0's outcome says so.
            with self.ended_together(), contextlib.suppress(Requeue):
                self._duties[duty](value)

    @contextlib.contextmanager
    def ended_together(self, alike: tuple[type[Exception], ...] = ()) -> Iterator[None]:
        """End all ranks with one message if the work within, which uses collectives, fails on this one, while
        the others wait for it. The process of this rank must end then, which ends their waiting; they and
        rank 0 raise ShareError with its message. ``alike``: what every rank raises at once, if one does."""
        try:
            yield
        except Exception as error:
            if self.world.size == 1 or isinstance(error, alike) or _TOLD in getattr(error, "__notes__", ()):
                raise
            self._refuse_if_one_has_ended()
            if "gloo" in str(error):  # another rank was killed
                raise
            said = f"rank {self.world.rank} failed: {type(error).__name__}: {error}"
            with contextlib.suppress(RuntimeError):  # rank 0 is gone, and its store
                launchers_store("ranks").set(_ENDED, said)
            if self.world.is_main and not alike:
                raise ShareError(said) from error
            print(f"error: {scrub_text(said)}", file=sys.stderr, flush=True)
            error.add_note(_TOLD)
            raise

    def _refuse_if_one_has_ended(self) -> None:
        """Raise ShareError with the message of a rank that has ended, if there is one."""
        try:
            store = launchers_store("ranks")
            said = store.get(_ENDED).decode() if store.check([_ENDED]) else None
        except RuntimeError:  # the store has ended with rank 0
            return
        if said is not None:
            raise ShareError(said)

    def collective(self, work: Callable[[T], R]) -> Callable[[T], R]:
        """Return a function that runs ``work`` on every rank when rank 0 calls it inside ``run_on_main``;
        ``work`` may use collectives. What it raises on any rank ends all (``ended_together``). Every rank
        calls this alike, and in the same order."""
        duty = len(self._duties)
        self._duties.append(work)

        def ask(value: T) -> R:
            if self.world.size > 1:
                assert self._helped, "the other ranks do not listen outside of run_on_main"
                from_main((duty, value))
            with self.ended_together(), by_itself(False):
                return work(value)

        return ask

    def map_over_ranks(self, work: Callable[[T], R]) -> Callable[[Sequence[T]], list[R]]:
        """Return a function that applies ``work`` to many items, a share of them on every rank, and returns
        the results in the items' order. ``work`` uses no collectives. Every rank calls this alike, as
        ``collective``.

        With several ranks, what ``work`` raises on any of them is raised once all are done: a UserError as it
        is, anything else as a ShareError.
        """
        rank, size = self.world.rank, self.world.size
        if size == 1:
            return map_locally(work)

        def share(items: Sequence[T]) -> list[tuple[list[R] | None, BaseException | None]]:
            mine = items[rank::size]
            with by_itself():
                done = self._tried(lambda: _each(work, mine))
            return gather_objects(done)

        on_every_rank = self.collective(share)

        def each(items: Sequence[T]) -> list[R]:
            parts: list[list[R]] = [unwrap(done) for done in on_every_rank(items)]
            return [parts[i % size][i // size] for i in range(len(items))]

        return each

    def _tried(self, work: Callable[[], R]) -> tuple[R | None, BaseException | None]:
        """Do as ``catch``, with an error that can be sent to other ranks: not every exception can."""
        try:
            return work(), None
        except (UserError, Requeue) as error:
            return None, error
        except Exception as error:
            traceback.print_exc()
            words = " ".join(f"{type(error).__name__}: {error}".split())
            return None, ShareError(f"rank {self.world.rank} could not do its share: {words}")


def map_locally(work: Callable[[T], R]) -> Callable[[Sequence[T]], list[R]]:
    """Return the function that ``Ranks.map_over_ranks`` returns, for this process alone."""
    return partial(_each, work)


def _each(work: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """Return the result of ``work`` for each item. Raises Requeue where the run is asked to stop
    meanwhile."""
    done = []
    for item in items:
        pause()
        done.append(work(item))
    return done


def catch(work: Callable[[], T]) -> tuple[T | None, BaseException | None]:
    """Return (the result of ``work``, the exception that it raised). The other ranks must be told of an
    exception: they would wait for ever if rank 0 left."""
    try:
        return work(), None
    except BaseException as error:
        return None, error


def unwrap(done: tuple[Any, BaseException | None]) -> Any:
    """Return the result in ``done``, the output of ``catch``, or raise its exception."""
    value, error = done
    if error is not None:
        raise error
    return value
