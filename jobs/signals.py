"""What a run does when it is asked to stop. Imports nothing heavy: it is in force before anything else is
loaded."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

REQUEUE = 75
"""Exit code of a run that was asked to stop and has lost nothing (EX_TEMPFAIL): start the same command again
with resume=true."""


class Requeue(SystemExit):
    """The run was interrupted by a signal, and saved."""

    def __init__(self) -> None:
        super().__init__(REQUEUE)


class Signals:
    """SIGTERM and SIGUSR1 (a cluster's warnings) ask for a stop after the step under way; a second one leaves
    at once.

    Until ``arm`` is called there is nothing to save, and the first one leaves at once.
    """

    def __init__(self) -> None:
        self.asked = False
        self._armed = False
        numbers: tuple[signal.Signals, ...] = (signal.SIGTERM, signal.SIGUSR1)
        if threading.current_thread() is not threading.main_thread():
            numbers = ()  # Python lets no other thread answer: a run in one is not asked to stop
        self._before = {number: signal.signal(number, self._handle) for number in numbers}

    def restore(self) -> None:
        """The run is over, and its program may go on: signals mean to it what they meant before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def arm(self) -> None:
        """From now on there is something to save first."""
        self._armed = True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._armed:
            os._exit(REQUEUE)
        if self.asked:
            os._exit(128 + number)
        self.asked = True
