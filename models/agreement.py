"""A request to stop as all ranks see it: which of them was asked, and the microbatch at which all stop."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from models.distributed import any_rank, any_rank_later, launchers_store

_KEY = "asked"
SECONDS = 0.5
"""A rank looks so often whether another was asked to stop."""


class StopRequest:
    """Whether one of several ranks was asked to stop. Nothing here waits for a device."""

    def __init__(self) -> None:
        self._store = launchers_store("stop")
        self._looked, self._heard = 0.0, 0
        self._said: Callable[[], bool] = bool

    def tell(self, number: int) -> None:
        """Tell the other ranks that this one got the signal ``number``. Any thread may call it."""
        with contextlib.suppress(RuntimeError):  # rank 0 is gone, and its store
            self._store.set(_KEY, str(number))

    def heard(self) -> int:
        """Return the number of a signal that a rank got, or 0; the ranks learn it one after another."""
        if not self._heard and time.monotonic() - self._looked > SECONDS:
            self._looked = time.monotonic()
            with contextlib.suppress(RuntimeError):
                self._heard = int(self._store.get(_KEY)) if self._store.check([_KEY]) else 0
        return self._heard

    def agreed(self, asked: bool, now: bool = False) -> bool:
        """Return on every rank whether one of them had ``asked`` at the call before; ``now``: at this one,
        for which the ranks wait. Every rank calls it alike, and what each says travels until the next."""
        if now:
            return any_rank(asked)
        said, self._said = self._said, any_rank_later(asked)
        return said()
