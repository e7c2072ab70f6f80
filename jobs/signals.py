"""Signal handling of a run, for requests to stop. It imports nothing heavy, because it must be active before
anything else is loaded."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING

from common.errors import REQUEUE
from common.progress import doing, stops_if
from config.machine import speaks

if TYPE_CHECKING:
    from models.distributed import StopRequest


class Signals:
    """Handlers of SIGTERM and SIGUSR1, a cluster's warnings, and of Ctrl-C, which ask for a stop.

    A request is answered at once, by a thread of its own where the main thread computes: what is under way,
    what is kept and how to go on. A second signal exits at once. Until ``arm`` is called there is nothing to
    save, and the first signal exits at once.
    """

    def __init__(self, interrupts: bool = False) -> None:
        """``interrupts``: Ctrl-C too, which is otherwise Python's KeyboardInterrupt."""
        self.stop_requested = False
        self._armed = False
        self.request: StopRequest | None = None
        """The request that several ranks agree on; None: no other rank waits for this one."""
        self.kept: Callable[[], str] | None = None
        """What is kept if the run ends at once, in words; None: nothing was trained."""
        self._announced: set[bool] = set()
        numbers: tuple[signal.Signals, ...] = (signal.SIGTERM, signal.SIGUSR1)
        if threading.current_thread() is not threading.main_thread():
            self._before, self._pipe = {}, None
            return  # Python handles signals in the main thread alone: a run in another has no handlers
        numbers += (signal.SIGINT,) if interrupts else ()
        self._pipe = os.pipe()
        os.set_blocking(self._pipe[1], False)
        self._wakes = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        self._handled = {int(number) for number in numbers}
        threading.Thread(target=self._listen, args=(self._pipe[0],), name="signals", daemon=True).start()
        self._before = {number: signal.signal(number, self._handle) for number in numbers}

    def restore(self) -> None:
        """Restore the previous handlers, for a program that continues after the run, and hold nothing of the
        run."""
        self.kept = self.request = None
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._pipe is not None:
            signal.set_wakeup_fd(self._wakes)
            os.close(self._pipe[1])  # ends the thread
            self._pipe = None
        stops_if(None)

    def arm(self) -> None:
        """From now on, let the first signal only set ``stop_requested``: there is something to save."""
        self._armed = True
        stops_if(self._stops, None if self.request is None else self.request.agreed)

    def _stops(self) -> bool:
        if threading.current_thread() is not threading.main_thread():
            return False
        if not self.stop_requested and self.request is not None and (number := self.request.heard()):
            self._tell(number)
            self.stop_requested = True
        return self.stop_requested

    def _listen(self, end: int) -> None:
        """Answer signals that the main thread, maybe within a long computation, has not handled yet."""
        while number := os.read(end, 1):
            if number[0] in self._handled:
                self._tell(number[0])
                if self.request is not None:
                    self.request.tell(number[0])
        os.close(end)

    def _tell(self, number: int) -> None:
        """Say once what a request leads to. The text goes past Python's streams, within whose locks a signal
        may have come."""
        if self._armed in self._announced or not speaks(os.environ):
            return
        self._announced.add(self._armed)
        kept = "nothing was trained by this start" if self.kept is None else self.kept()
        name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        message = f"{name}, in: {doing()}. "
        if self._armed:
            message += (
                "The run ends at the next point that it can go on from, and saves; the same command with "
                f"resume=true goes on. A second {name} ends it at once: {kept}."
            )
        else:
            message += f"The run ends: {kept}. The same command begins again; cache_dir keeps scores."
        with contextlib.suppress(OSError):
            os.write(2, f"{chr(13) + chr(27) + '[K' if os.isatty(2) else ''}{message}\n".encode())

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.stop_requested:
            os._exit(128 + number)
        self._tell(number)
        if not self._armed:
            if self.request is not None:
                self.request.tell(number)  # the thread may not have done it yet
            os._exit(REQUEUE)
        self.stop_requested = True
