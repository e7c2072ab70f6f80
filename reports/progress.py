"""A run's progress as a bar with an ETA on a terminal, or as a line every ten seconds in a log file."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, TextIO

from tqdm import tqdm

SECONDS_BETWEEN_LINES = 10.0
SECONDS_BETWEEN_REDRAWS = 0.2


class _Lines:
    """A stream for tqdm where a carriage return has no effect: it writes each state of the bar on a line of
    its own."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._last = ""

    def write(self, text: str) -> None:
        line = text.strip()
        if line and line != self._last:  # tqdm closes a bar by drawing it again
            self._stream.write(line + "\n")
            self._last = line

    def flush(self) -> None:
        self._stream.flush()


class Bar(tqdm):
    """A tqdm bar that estimates the time left from the mean over everything measured, not from the last steps
    alone, because rounds and evaluations come at intervals."""

    _since: tuple[int, float] | None = None
    _waits = False

    def wait(self) -> None:
        """Show no time left until ``measure`` is called."""
        self._waits = True

    def measure(self) -> None:
        """Start measuring the speed now, because earlier work (a first evaluation, a compiler's first step)
        does not predict the time of the rest."""
        if not self.disable:
            self._since = (self.n, self._time())

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        with self.external_write_mode():
            print(text, flush=True)

    @property
    def format_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = super().format_dict
        if self._since is not None:
            n, at = self._since
            seconds = self._time() - at
            found["rate"] = (found["n"] - n) / seconds if seconds > 0 else 0.0
        elif self._waits:
            found["rate"] = 0.0  # tqdm shows a question mark
        return found


def progress(
    work: Iterable[Any] | int,
    desc: str,
    *,
    unit: str = "step",
    done: int = 0,
    shown: bool = True,
    stream: TextIO | None = None,
    delay: float = 0.0,
) -> Bar:
    """Return a tqdm bar over ``work``, to iterate over or (for a number) to ``update()``; a context manager
    either way. With ``delay``, work that takes fewer seconds shows nothing.

    ``done``: steps of the total that a resumed run finished before; ``shown=False`` on ranks above 0;
    ``stream`` is stderr if not given. Metrics go to the end of the bar: ``bar.set_postfix_str(status(record),
    refresh=False)`` before ``bar.update()``.
    """
    out = sys.stderr if stream is None else stream
    terminal = out.isatty()
    bar = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"
    line = "{desc}: {n_fmt}/{total_fmt} " + unit + "s, {elapsed} so far, {remaining} to go{postfix}"
    return Bar(
        iterable=None if isinstance(work, int) else work,
        total=work if isinstance(work, int) else None,
        desc=desc,
        unit=unit,
        initial=done,
        disable=not shown,
        file=out if terminal else _Lines(out),
        bar_format=bar if terminal else line,
        mininterval=SECONDS_BETWEEN_REDRAWS if terminal else SECONDS_BETWEEN_LINES,
        miniters=1,  # check the clock at every update: a step may take longer than a line's ten seconds
        dynamic_ncols=terminal,
        delay=delay,
    )


def status(record: dict[str, Any]) -> str:
    """Return the numbers of a metrics line that are worth watching, as far as it has them."""
    shown = (
        ("loss", "loss {:.4f}"),
        ("reward_margin", "margin {:+.3f}"),
        ("reward_accuracy", "accuracy {:.0%}"),
        ("lr", "lr {:.2e}"),
        ("tokens_per_second", "{:,.0f} tokens/s"),
        ("gpu_memory_gib", "{:.1f} GiB"),
    )
    return ", ".join(form.format(record[key]) for key, form in shown if record.get(key) is not None)


def round_line(index: int, metrics: dict[str, Any]) -> str:
    """Return a round's sampling metrics as a line for the terminal."""
    reward = "no reward" if metrics["reward"] is None else f"reward {metrics['reward']:.3f}"
    return (
        f"round {index}: {metrics['contexts']} contexts, {metrics['keep_rate']:.0%} kept, {reward}, "
        f"{metrics['length']:.0f} tokens a sample, {metrics['finished']:.0%} finished; "
        f"sampled in {metrics['sample_seconds']:.1f} s, scored in {metrics['score_seconds']:.1f} s"
    )
