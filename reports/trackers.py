"""Trackers beside metrics.jsonl and wandb: each is a class, named by a file of config/trackers.

python train.py trackers=[mine]      # config/trackers/mine.yaml
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from common.errors import ConfigError
from common.imports import check_keys, import_function
from common.secrets import scrub, scrub_text
from reports.metrics import Record


class ExternalTracker(Protocol):
    """The methods of a tracker. It is made as ``cls(run_dir, config, **numbers)`` from the run's folder, all
    settings as plain data without secrets, and the keys of its yaml file. Only rank 0 has one."""

    def log(self, record: Record, step: int) -> None:
        """Record a line of metrics.jsonl; a number that is not known at this step is None."""

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        """Record samples, one per row."""

    def histogram(self, name: str, counts: Sequence[int], edges: Sequence[float], step: int) -> None:
        """Record ``counts`` [bins] between ``edges`` [bins - 1]; the two outer bins are open."""

    def summary(self, values: Record) -> None:
        """Record the numbers that summarize the whole run."""

    def finish(self) -> None:
        """End the run."""


class Fused:
    """A tracker whose first failure is reported and disables it, so that a tracker's error does not end a
    run. ``make`` may return None: there is nothing to tell."""

    def __init__(self, name: str, make: Callable[[], ExternalTracker | None]) -> None:
        self.name = name
        self._tracker: ExternalTracker | None = None
        self._guard(lambda: setattr(self, "_tracker", make()))

    def tell(self, method: str, *arguments: Any) -> None:
        """Call a method of the tracker, unless the tracker has failed."""
        if self._tracker is not None:
            self._guard(lambda: getattr(self._tracker, method)(*arguments))

    def _guard(self, call: Callable[[], object]) -> None:
        try:
            call()
        except Exception as error:
            why = f"failed ({type(error).__name__}: {in_a_line(error)})"
            warn(self.name, f"{why}; the run goes on without it, metrics.jsonl has its numbers")
            self._tracker = None


def warn(name: str, message: str) -> None:
    """Print a warning about a tracker on the console, not by logging, which a program may have silenced."""
    print(f"warning: {name}: {scrub_text(message)}", file=sys.stderr, flush=True)


def in_a_line(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__


def check_trackers(trackers: dict[str, Any]) -> None:
    """Raise ConfigError for a tracker that cannot be made from its yaml file: it names no class, has a key
    that the class does not take, or lacks a required one."""
    for name, tree in trackers.items():
        if not isinstance(tree, dict) or "_target_" not in tree:
            raise ConfigError(f"trackers.{name}", tree, "needs a _target_, the class that it is")
        takes = inspect.signature(import_function(f"trackers.{name}._target_", tree["_target_"])).parameters
        numbers = {key: p for key, p in takes.items() if p.kind is inspect.Parameter.KEYWORD_ONLY}
        check_keys(f"trackers.{name}", tree, numbers)


def open_trackers(run_dir: Path, config: Record) -> list[Fused]:
    """Return the trackers that ``config["trackers"]`` names, in its order."""
    shown = scrub(config)

    def make(name: str, tree: dict[str, Any]) -> Callable[[], ExternalTracker]:
        cls = import_function(f"trackers.{name}._target_", tree["_target_"])
        numbers = {key: value for key, value in tree.items() if key != "_target_"}
        return lambda: cls(run_dir, shown, **numbers)

    trees = (config.get("trackers") or {}).items()
    return [Fused(f"trackers.{name}", make(name, tree)) for name, tree in trees]
