"""A program's output: what cannot be written ends no program, and secrets are removed; and what it is doing,
as a bar with the time left on a terminal, or as lines every ten seconds in a log file.

``progress`` makes a bar over counted work, ``phase`` names work of unknown length. Where ``pulse`` was
called, a thread draws the innermost of them again every second, so that no work is silent.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import select
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any, ClassVar, TextIO, TypeVar

from tqdm import tqdm

from common.errors import Requeue
from common.secrets import scrub_text

T = TypeVar("T")
SECONDS_BETWEEN_LINES = 10.0
SECONDS_BETWEEN_REDRAWS = 0.2
SOON = 1.0
"""Work that takes fewer seconds shows no bar, and what takes longer is drawn again so often."""


NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""System error numbers for a file that cannot grow: the disk is full, or a quota or size limit is reached."""


def no_room(error: OSError) -> bool:
    """Return whether ``error`` says that a file cannot grow."""
    return error.errno in NO_ROOM


class _Forgiving(io.FileIO):
    """A file descriptor that drops the bytes which its file, pipe or terminal does not take."""

    def write(self, data: object) -> int:
        rest = memoryview(data).cast("B")  # type: ignore[arg-type]
        size = len(rest)
        with contextlib.suppress(OSError):
            while rest:
                written = super().write(rest)
                if written is None:  # a pipe that does not block is full
                    select.select([], [self], [])
                rest = rest[written or 0 :]
        return size


class _Clean(io.TextIOWrapper):
    """A stream that removes secrets from what is printed: tracebacks and libraries quote settings too. On a
    terminal a bar makes room for a line."""

    def write(self, text: str) -> int:
        if _line.drawer != threading.get_ident() and text and self.isatty():
            if _line.drawn:
                super().write("\r\x1b[K")
            _line.drawn, _line.within = False, not text.endswith("\n")
        super().write(scrub_text(text))
        return len(text)


class _Line:
    """The last line of the terminal. ``drawer``: the thread that draws a bar at present; ``drawn``: whether
    there is a bar; ``within``: whether there is the beginning of a printed line."""

    drawer, drawn, within = 0, False, False


_line = _Line()


def guard_output() -> None:
    """From now on, remove secrets from what this program prints, drop it where it cannot be written (a full
    disk, a closed pipe or descriptor), and escape letters that the output's encoding lacks: a log is not
    worth a run. Streams that somebody put in place of the process's own stay as they are."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        if stream is not getattr(sys, f"__{name}__"):
            continue
        if stream is None:  # closed at the start: what this program opens next must not get its number
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)
            setattr(sys, name, os.fdopen(number, "w"))
            continue
        with contextlib.suppress(OSError):
            stream.flush()
        raw: Any = _Forgiving(stream.fileno(), "w", closefd=False)
        wrapped = _Clean(
            raw,  # nothing waits in a buffer: it could not be dropped from there
            encoding=stream.encoding,
            errors="backslashreplace",
            line_buffering=True,
            write_through=True,
        )
        setattr(sys, name, wrapped)


class _BarStream:
    """The stream that tqdm writes a bar to: the last line of a terminal. Elsewhere a carriage return has no
    effect, so each state of the bar is a line of its own."""

    def __init__(self, stream: TextIO, terminal: bool) -> None:
        self._stream, self._terminal, self._last = stream, terminal, ""
        self.encoding = stream.encoding or "utf-8"
        self.flush = stream.flush

    def write(self, text: str) -> None:
        line = text.strip()
        if self._terminal:
            _line.drawer = threading.get_ident()
            try:
                self._stream.write(text)
            finally:
                _line.drawer, _line.drawn = 0, line != "" and not text.endswith("\n")
        elif line and line != self._last:  # tqdm closes a bar by drawing it again
            self._stream.write(line + "\n")
            self._last = line

    def fileno(self) -> int:
        return self._stream.fileno()


class Bar(tqdm):
    """A tqdm bar that estimates the time left from the mean over everything measured, not from the last steps
    alone, because rounds and evaluations come at intervals. What is under way counts as if it took the mean.
    All bars share one line."""

    opened: ClassVar[list[Bar]] = []
    """The bars that are shown, the innermost last."""
    spent: ClassVar[dict[str, float]] = {}
    """Description -> seconds of the bars that were shown and are closed, without those within them."""
    last_print_t: float
    """tqdm's: when it was drawn, in seconds of its clock."""
    _since: tuple[int, float] | None = None
    _waits = False
    _ends: Sequence[float] = ()
    _updated: tuple[int, float] | None = None
    """How often it was updated since ``measure``, and when last."""
    _within = 0.0

    def __iter__(self) -> Iterator[Any]:
        with self:
            for item in self.iterable:
                yield item
                self.update()

    def update(self, n: float | None = 1) -> bool | None:
        if not self.disable:
            self._updated = ((self._updated or (0, 0.0))[0] + 1, self._time())
        return super().update(n)  # type: ignore[no-any-return]

    def weigh(self, costs: Iterable[float]) -> None:
        """Take the time left in proportion to the ``costs`` of all steps (such as their tokens), of which the
        first is that of step 0."""
        self._ends = list(accumulate(costs, initial=0.0))

    def display(self, *args: Any, **options: Any) -> Any:
        self.nrows = 2  # a terminal that does not tell its size (a container's) has a line all the same
        return super().display(*args, **options)

    def wait(self) -> None:
        """Show no time left until ``measure`` is called."""
        self._waits = True

    def measure(self) -> None:
        """Start measuring the speed now, because earlier work (a first evaluation, a compiler's first step)
        does not predict the time of the rest."""
        if not self.disable:
            self._since, self._updated = (self.n, self._time()), None

    def beat(self) -> bool:
        """Draw the bar again, if it was not drawn a short while ago. Return whether it has lasted long enough
        to be shown."""
        now = self._time()
        due: bool = now - self.start_t >= self.delay
        if due and now - self.last_print_t >= max(self.mininterval, SOON):
            self.refresh()
            self.last_print_t = now
        return due

    def own_seconds(self) -> float:
        """Return the seconds so far, without those of the bars within."""
        return self._time() - self.start_t - self._within  # type: ignore[no-any-return]

    def close(self) -> None:
        others = [bar for bar in Bar.opened if bar is not self]  # tqdm compares bars by their place
        if len(others) < len(Bar.opened):
            Bar.opened[:] = others
            Bar.spent[self.desc] = Bar.spent.get(self.desc, 0.0) + self.own_seconds()
            if others:
                others[-1]._within += self._time() - self.start_t
        super().close()

    @property
    def format_dict(self) -> dict[str, Any]:
        fields: dict[str, Any] = super().format_dict
        if (fields["ncols"] or 1) < 1:
            fields["ncols"] = 100
        left = None if self._waits and self._since is None else self._seconds_left()
        ended = self.total is not None and self.n >= self.total
        fields["rate"] = (self.total - self.n) / left if left else float(ended)  # 0: tqdm shows "?"
        return fields

    def _seconds_left(self) -> float | None:
        """Return the estimate; None before a step was measured, and at the end."""
        since, begun = self._since or (self.initial, getattr(self, "start_t", 0.0))
        if self._updated is None or not since < self.n < (self.total or 0):
            return None
        updates, at = self._updated
        ends = self._ends or range(self.total + 1)
        first, done, whole = (ends[min(int(n), len(ends) - 1)] for n in (since, self.n, self.total))
        left = (at - begun) * (whole - done) / max(done - first, 1)
        return max(left - min(self._time() - at, (at - begun) / updates), SOON)


Bar.set_lock(threading.RLock())  # tqdm's own is for several processes, and starts another one to keep it


def progress(
    work: Iterable[Any] | int | None,
    desc: str,
    *,
    unit: str = "step",
    done: int = 0,
    shown: bool | None = True,
    stream: TextIO | None = None,
    delay: float = 0.0,
    leave: bool = True,
) -> Bar:
    """Return a tqdm bar over ``work``, to iterate over or (for a number) to ``update()``; a context manager
    either way. With ``delay``, work that takes fewer seconds shows nothing.

    ``work``: None where nothing is counted. ``done``: steps of the total that a resumed run finished before;
    ``shown=False`` on ranks above 0, None where ``pulse`` was not called; ``stream`` is stderr if not given;
    ``leave=False`` takes the bar away at the end.
    Metrics go to the end of the bar: ``bar.set_postfix_str(status(record), refresh=False)`` before
    ``bar.update()``.
    """
    out = sys.stderr if stream is None else stream
    terminal = out.isatty()
    if work is None:
        bar, line = "{desc}: {elapsed}{postfix}", "{desc}: {elapsed} so far{postfix}"
    else:
        bar = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"
        line = "{desc}: {n_fmt}/{total_fmt} " + unit + "s, {elapsed} so far, {remaining} to go{postfix}"
    progress_bar = Bar(
        iterable=None if isinstance(work, int) else work,
        total=work if isinstance(work, int) else None,
        desc=desc,
        unit=unit,
        initial=done,
        leave=leave and work is not None,
        position=0,
        disable=not (_pulsing if shown is None else shown),
        file=_BarStream(out, terminal),
        bar_format=bar if terminal else line,
        mininterval=SECONDS_BETWEEN_REDRAWS if terminal else SECONDS_BETWEEN_LINES,
        miniters=1,  # check the clock at every update: a step may take longer than a line's ten seconds
        dynamic_ncols=terminal,
        delay=delay if terminal or not delay else max(delay, SECONDS_BETWEEN_LINES),
    )
    if not progress_bar.disable:
        Bar.opened.append(progress_bar)
    return progress_bar


def phase(what: str, key: str | None = None) -> Bar:
    """Return a context in which ``what`` is shown to be under way. ``key``: the setting that bounds it."""
    return progress(None, what if key is None else f"{what} ({key})", shown=None, delay=SOON)


def seconds_so_far() -> str:
    """Return the seconds of everything that was shown since the last call, longest first, as one line."""
    spent, within = Bar.spent.copy(), 0.0
    for bar in reversed(Bar.opened):
        spent[bar.desc if "(" in bar.desc else "the rest"] = bar.own_seconds() - within
        within = bar._time() - bar.start_t
    Bar.spent.clear()
    longest = sorted(spent.items(), key=lambda item: -item[1])
    return ", ".join(f"{seconds:.0f} {what}" for what, seconds in longest if seconds >= SOON)


def doing() -> str:
    """Return what is under way, in words."""
    return Bar.opened[-1].desc if Bar.opened else "between two steps"


_pulsing = False


def pulse() -> None:
    """From now on, show what this program does, and draw it again every second."""
    global _pulsing
    if not _pulsing:
        _pulsing = True
        threading.Thread(target=_beats, name="progress", daemon=True).start()


def _beats() -> None:
    while True:
        time.sleep(SOON / 2)
        if not _line.within:  # what has begun just now is not shown yet, but what it belongs to is
            any(bar.beat() for bar in Bar.opened[::-1])


Agreed = Callable[[bool, bool], bool]
"""How ranks that compute together end their work at the same part of it: whether this one ``requested`` it,
and whether it is to be ``now`` -> on every rank, whether one had requested it at the call before, or now."""


_requested: Callable[[], bool] = bool
_agreed: Agreed | None = None
_by_itself = False


def stops_if(requested: Callable[[], bool] | None, agreed: Agreed | None = None) -> None:
    """Let long work end between its parts once ``requested`` returns true; None: never. ``agreed``: with
    several ranks, how those that compute together end it together."""
    global _requested, _agreed
    _requested, _agreed = requested or bool, agreed


def stopping() -> bool:
    """Return whether long work is to end, as the run was asked to stop."""
    return _requested()


@contextlib.contextmanager
def by_itself(alone: bool = True) -> Iterator[None]:
    """Within it this rank works alone, while others wait for its result, so that it may stop when it wants.
    ``alone=False``: it works together with them again."""
    global _by_itself
    before, _by_itself = _by_itself, alone
    try:
        yield
    finally:
        _by_itself = before


def pause() -> None:
    """Called between the parts of long work that a process does by itself. Raises Requeue where
    ``stopping``."""
    if (_agreed is None or _by_itself) and stopping():
        raise Requeue


def pause_together(now: bool = False) -> None:
    """Called, on every rank alike, between the parts of long work that ranks do together. Raises Requeue on
    all of them at the same part: the next but one after that in which one was ``stopping``, or ``now``."""
    if stopping() if _agreed is None else _agreed(stopping(), now):
        raise Requeue


def interruptible(parts: Iterable[T]) -> Iterator[T]:
    """Yield the parts of long work that ranks do together, every rank as many, with a pause before each."""
    for part in parts:
        pause_together()
        yield part
