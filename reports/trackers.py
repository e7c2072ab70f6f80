"""Trackers beside metrics.jsonl and wandb: each is a class and a file of config/trackers that names it.

python train.py trackers=[mine]      # config/trackers/mine.yaml
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from common.errors import require
from common.imports import import_function
from reports.metrics import Record
from reports.provenance import scrub


class ExternalTracker(Protocol):
    """What a tracker is told. It is made as ``cls(run_dir, config, **numbers)``: the run's folder, all
    settings as plain data without secrets, and the keys of its yaml. Only rank 0 has one."""

    def log(self, record: Record, step: int) -> None:
        """A line of metrics.jsonl; what is not known at this step is None."""

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        """Samples, a row each."""

    def histogram(self, name: str, counts: Sequence[int], edges: Sequence[float], step: int) -> None:
        """``counts`` [bins] between ``edges`` [bins - 1]: the outer two bins are open."""

    def summary(self, values: Record) -> None:
        """The numbers that stand for the whole run."""

    def finish(self) -> None:
        """The run has ended."""


class Fused:
    """A tracker behind a fuse: its first failure is told, and nothing is asked of it again. A tracker is not
    worth a run."""

    def __init__(self, name: str, make: Callable[[], ExternalTracker]) -> None:
        self.name = name
        self._tracker: ExternalTracker | None = None
        self._guard(lambda: setattr(self, "_tracker", make()))

    def tell(self, method: str, *arguments: Any) -> None:
        """Call a method of the tracker, if it has not failed yet."""
        if self._tracker is not None:
            self._guard(lambda: getattr(self._tracker, method)(*arguments))

    def _guard(self, call: Callable[[], object]) -> None:
        try:
            call()
        except Exception as error:
            text = " ".join(str(error).split()) or type(error).__name__
            print(
                f"warning: trackers.{self.name}: failed ({type(error).__name__}: {text}); the run goes on "
                "without it, "
                "metrics.jsonl has its numbers",
                file=sys.stderr,
                flush=True,
            )
            self._tracker = None


def check_trackers(trackers: dict[str, Any]) -> None:
    """Raise ConfigError for a tracker that cannot be made from its yaml: no class, a key that it does not
    take or lacks."""
    for name, tree in trackers.items():
        require(
            isinstance(tree, dict) and "_target_" in tree,
            f"trackers.{name}",
            tree,
            "needs a _target_, the class that it is",
        )
        takes = inspect.signature(import_function(f"trackers.{name}._target_", tree["_target_"])).parameters
        numbers = [key for key, p in takes.items() if p.kind is inspect.Parameter.KEYWORD_ONLY]
        for key, value in tree.items():
            require(
                key == "_target_" or key in numbers,
                f"trackers.{name}.{key}",
                value,
                f"{tree['_target_']} does not take it; it takes {', '.join(numbers) or 'no settings'}",
            )
        for key in numbers:
            needed = takes[key].default is inspect.Parameter.empty
            require(not needed or key in tree, f"trackers.{name}.{key}", "???", "has no default; give it")


def open_trackers(run_dir: Path, config: Record) -> list[Fused]:
    """The trackers that ``config["trackers"]`` names, in its order."""
    shown = scrub(config)

    def make(name: str, tree: dict[str, Any]) -> Callable[[], ExternalTracker]:
        cls = import_function(f"trackers.{name}._target_", tree["_target_"])
        numbers = {key: value for key, value in tree.items() if key != "_target_"}
        return lambda: cls(run_dir, shown, **numbers)

    return [Fused(name, make(name, tree)) for name, tree in (config.get("trackers") or {}).items()]
