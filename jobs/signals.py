"""Signal handling of a run, for requests to stop. It imports nothing heavy, because it must be active before
anything else is loaded."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

REQUEUE = 75
"""Exit code of a run that was asked to stop and lost nothing (EX_TEMPFAIL): run the same command again with
resume=true."""


class Requeue(SystemExit):
    """Raised to exit a run that was interrupted by a signal, after saving it."""

    def __init__(self) -> None:
        super().__init__(REQUEUE)


class Signals:
    """Handlers of SIGTERM and SIGUSR1, a cluster's warnings, which ask for a stop after the current step.

    A second signal exits at once. Until ``arm`` is called there is nothing to save, and the first signal
    exits at once.
    """

    def __init__(self) -> None:
        self.asked = False
        self._armed = False
        numbers: tuple[signal.Signals, ...] = (signal.SIGTERM, signal.SIGUSR1)
        if threading.current_thread() is not threading.main_thread():
            numbers = ()  # Python handles signals in the main thread alone: a run in another has no handlers
        self._before = {number: signal.signal(number, self._handle) for number in numbers}

    def restore(self) -> None:
        """Restore the previous handlers, for a program that continues after the run."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def arm(self) -> None:
        """From now on, let the first signal only set ``asked``, because there is something to save."""
        self._armed = True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._armed:
            os._exit(REQUEUE)
        if self.asked:
            os._exit(128 + number)
        self.asked = True
