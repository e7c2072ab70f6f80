"""Callbacks that observe a run, given as objects (``train(config, name, observers=[…])``) or by their import
path (``callbacks``).

They live on rank 0. They receive copies of the run's numbers and may ask for a stop; nothing else that they
do changes a number of the run.
"""

from __future__ import annotations

import copy
import inspect
import random
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common.errors import ConfigError, UserError, require
from common.imports import check_keys, import_function
from common.secrets import scrub, scrub_text
from models.distributed import World, any_rank, on_main
from reports.metrics import plain
from rollouts.inputs import target_of

Asks = str | bool | None
"""Return value of an observer: the reason for a stop, or True; None or False to let the run continue."""


class Observer:
    """The methods that an observer may have, all of them optional.

    Any class with some of these methods is an observer; it need not inherit from this one."""

    def on_start(self, run_dir: Path, config: dict[str, Any], step: int) -> None:
        """Called when training begins or resumes, before ``step``.

        ``config``: all settings as plain data, without secrets."""

    def on_step(self, record: dict[str, Any]) -> Asks:
        """Called with a line of metrics.jsonl while the next step runs.

        A requested stop takes effect before the step after that one."""
        return None

    def on_evaluation(self, step: int, values: dict[str, Any]) -> Asks:
        """Called with the ``eval_*`` metrics of the weights before ``step``.

        A requested stop takes effect before that step."""
        return None

    def on_round(self, index: int, values: dict[str, Any]) -> Asks:
        """Called online with the metrics of a round's samples when training on the round starts.

        A requested stop takes effect before the round's next step."""
        return None

    def on_end(self, summary: dict[str, Any]) -> None:
        """Called when the run is done, with the contents of summary.json."""


METHODS = ("on_start", "on_step", "on_evaluation", "on_round", "on_end")


class Observers:
    """The observers of a run. Every rank has an instance of this class, but only rank 0's holds observers.

    An observer that raises is reported, and the run continues without it: like a tracker, an observer is not
    worth losing a run."""

    def __init__(self, members: Mapping[str, Any] | None = None, present: bool = False) -> None:
        """``present``: whether some rank has observers; then all ranks ask each other for requested stops."""
        self._members = dict(members or {})
        self.present = present or bool(self._members)
        self._stop: tuple[int, str] | None = None

    @classmethod
    def of(
        cls, callbacks: Mapping[str, Any], given: Sequence[Any], world: World, make: bool = True
    ) -> Observers:
        """Return the observers that the settings name and those that are ``given``.

        ``make``: whether rank 0 creates the former; a dry run only checks them. Raises ConfigError on every
        rank."""
        for name, tree in callbacks.items():
            check_callback(name, tree)
        for i, observer in enumerate(given):
            check_observer(f"observers[{i}]", observer)
        made: dict[str, Any] = {}
        if make:
            on_main(
                lambda: made.update({f"callbacks.{name}": _made(name, t) for name, t in callbacks.items()})
            )
        if world.is_main:
            made |= {f"observers[{i}]": observer for i, observer in enumerate(given)}
        return cls(made, bool(callbacks) or len(given) > 0)

    def start(self, run_dir: Path, config: dict[str, Any], step: int) -> None:
        self._tell("on_start", run_dir, scrub(config), step)

    def step(self, record: dict[str, Any]) -> None:
        self._ask(record["step"] + 2, "on_step", plain(record))

    def evaluation(self, step: int, values: Mapping[str, Any]) -> None:
        self._ask(step, "on_evaluation", step, plain(dict(values)))

    def round(self, index: int, step: int, values: Mapping[str, Any]) -> None:
        self._ask(step, "on_round", index, plain(dict(values)))

    def end(self, summary: dict[str, Any]) -> None:
        self._tell("on_end", plain(summary))

    def stops(self, step: int) -> str | None:
        """Return the reason why the run is to end before ``step``; None where it continues.

        All ranks agree on whether to end, but only rank 0 has the words; the others return ""."""
        asked = self._stop is not None and self._stop[0] <= step
        if not self.present or not any_rank(asked):
            return None
        return "" if self._stop is None else self._stop[1]

    def state(self) -> list[Any] | None:
        """Return the requested stop, for a checkpoint."""
        return None if self._stop is None else list(self._stop)

    def restore(self, state: list[Any] | None) -> None:
        """Restore a requested stop, so that a resumed run ends at the same step if it still has observers."""
        if state is not None and self.present:
            self._stop = (int(state[0]), str(state[1]))

    def _ask(self, stop_at: int, method: str, *arguments: Any) -> None:
        for name, asked in self._tell(method, *arguments):
            if asked and self._stop is None:
                self._stop = (stop_at, f"{name} asked for it{f': {asked}' if isinstance(asked, str) else ''}")

    def _tell(self, method: str, *arguments: Any) -> list[tuple[str, Any]]:
        """Call the method of each observer that has it; return (observer name, return value) pairs."""
        said = []
        for name, observer in list(self._members.items()):
            call = getattr(observer, method, None)
            if call is None:
                continue
            try:
                with _own_random_numbers():
                    asked = call(*copy.deepcopy(arguments))
                if not isinstance(asked, str | bool | np.bool_ | None):
                    raise TypeError(f"it returned {asked!r}, which is neither the reason for a stop nor True")
                said.append((name, asked))
            except Exception as error:
                del self._members[name]
                print(f"warning: {_failure(name, method, error)}", file=sys.stderr, flush=True)
        return said


def check_callback(name: str, tree: Any) -> None:
    """Raise ConfigError for a callback that cannot be created from its settings.

    The reasons are: no ``_target_``, a key that it does not accept or lacks, or no method of an observer."""
    key = f"callbacks.{name}"
    cls = import_function(f"{key}._target_", target_of(name, tree))
    takes = {
        word: p
        for word, p in inspect.signature(cls).parameters.items()
        if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD, p.VAR_KEYWORD)
    }
    check_keys(key, tree, takes)
    if inspect.isclass(cls):
        check_observer(f"{key}._target_", cls)


def check_observer(key: str, observer: Any) -> None:
    """Raise ConfigError for an object or class that is not a valid observer.

    The reasons are: none of the methods, an ``on_`` method that nothing would call, or a method that does not
    accept its arguments."""
    value = observer.__qualname__ if inspect.isclass(observer) else type(observer).__qualname__
    own = [word for word in dir(observer) if word.startswith("on_")]
    known = f"an observer has some of {', '.join(METHODS)} (docs/extend.md)"
    for word in own:
        require(word in METHODS, key, value, f"nothing calls its {word}; {known}")
    require(own != [], key, value, f"is no observer: {known}")
    for word in own:
        method = getattr(observer, word)
        require(callable(method), key, value, f"its {word} is not a method; {known}")
        wanted = list(inspect.signature(getattr(Observer, word)).parameters)[1:]
        told = [None] * (len(wanted) + (1 if _unbound(observer, word) else 0))
        try:
            inspect.signature(method).bind(*told)
        except TypeError as error:
            raise ConfigError(key, value, f"its {word} takes ({', '.join(wanted)}): {error}") from error


def _unbound(observer: Any, word: str) -> bool:
    """Return whether ``observer`` is a class whose method still takes ``self``."""
    return inspect.isclass(observer) and not isinstance(
        inspect.getattr_static(observer, word), staticmethod | classmethod
    )


def _made(name: str, tree: Mapping[str, Any]) -> Any:
    key = f"callbacks.{name}"
    make: Callable[..., Any] = import_function(f"{key}._target_", tree["_target_"])
    given = {word: value for word, value in tree.items() if word != "_target_"}
    try:
        with _own_random_numbers():
            observer = make(**given)
    except UserError:
        raise
    except Exception as error:
        raise ConfigError(key, tree["_target_"], f"could not be made: {_where(error)}") from error
    check_observer(f"{key}._target_", observer)
    return observer


def _failure(name: str, method: str, error: Exception) -> str:
    return f"{name}: {method} failed, {_where(error)}; the run goes on without it"


def _where(error: Exception) -> str:
    """Return file, line and message of an error, located in the observer's code."""
    frames = traceback.extract_tb(error.__traceback__)[1:]  # the first frame is the call in this module
    at = f"{frames[0].filename}, line {frames[0].lineno}: " if frames else ""
    text = " ".join(str(error).split())
    return scrub_text(f"{at}{type(error).__name__}{f': {text}' if text else ''}")


@contextmanager
def _own_random_numbers() -> Iterator[None]:
    """Restore the run's random states afterwards, so that an observer's random draws do not change them."""
    ours = (torch.get_rng_state(), random.getstate(), np.random.get_state())
    try:
        yield
    finally:
        torch.set_rng_state(ours[0])
        random.setstate(ours[1])
        np.random.set_state(ours[2])
