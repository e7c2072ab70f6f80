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
from typing import Any

import numpy as np
import torch

from common.errors import ConfigError, UserError
from common.imports import check_keys, import_function
from common.secrets import scrub_text
from models.distributed import World, any_rank, on_main
from rollouts.inputs import target_of

METHODS = ("on_start", "on_step", "on_evaluation", "on_round", "on_end")
"""Methods that an observer may have (docs/extend.md). All but the first and the last may return the reason
for a stop, or True."""


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
    def of(cls, callbacks: Mapping[str, Any], further: Sequence[Any], world: World) -> Observers:
        """Return the observers that the settings name, which rank 0 creates, and the ``further`` ones.
        Raises ConfigError on every rank."""
        members = {f"observers[{i}]": one for i, one in enumerate(further) if world.is_main}
        created = {f"callbacks.{name}": tree for name, tree in callbacks.items()}
        on_main(lambda: members.update({key: _create(key, tree) for key, tree in created.items()}))
        return cls(members, bool(callbacks) or len(further) > 0)

    def stops(self, step: int) -> str | None:
        """Return the reason why the run is to end before ``step``; None where it continues.

        All ranks agree on whether to end, but only rank 0 has the words; the others return ""."""
        due = self._stop is not None and self._stop[0] <= step
        if not self.present or not any_rank(due):
            return None
        return "" if self._stop is None else self._stop[1]

    def state(self) -> list[Any] | None:
        """Return the requested stop, for a checkpoint."""
        return None if self._stop is None else list(self._stop)

    def restore(self, state: list[Any] | None) -> None:
        """Restore a requested stop, so that a resumed run ends at the same step if it still has observers."""
        if state is not None and self.present:
            self._stop = (int(state[0]), str(state[1]))

    def tell(self, method: str, *arguments: Any, stop_at: int | None = None) -> None:
        """Call the method of each observer that has it, with copies. The first that asks for a stop gets it
        before step ``stop_at``."""
        for name, observer in list(self._members.items()):
            try:
                with _keeping_random_states():
                    answer = getattr(observer, method, lambda *_: None)(*copy.deepcopy(arguments))
                if not isinstance(answer, str | bool | np.bool_ | None):
                    raise TypeError(f"it returned {answer!r}: neither the reason for a stop nor True")
            except Exception as error:
                del self._members[name]
                failed = f"{name}: {method} failed, {_where(error)}; the run goes on without it"
                print(f"warning: {failed}", file=sys.stderr, flush=True)
                continue
            if answer and stop_at is not None and self._stop is None:
                why = f": {answer}" if isinstance(answer, str) else ""
                self._stop = (stop_at, f"{name} asked for it{why}")


def check_callback(name: str, tree: Any) -> None:
    """Raise ConfigError for a callback that cannot be created from its settings: no ``_target_``, a key that
    it does not accept or lacks, or no method of an observer."""
    key = f"callbacks.{name}"
    cls = import_function(f"{key}._target_", target_of(name, tree))
    parameters = inspect.signature(cls).parameters
    check_keys(key, tree, {w: p for w, p in parameters.items() if p.kind is not p.VAR_POSITIONAL})
    if inspect.isclass(cls):
        check_observer(f"{key}._target_", cls)


def check_observer(key: str, observer: Any) -> None:
    """Raise ConfigError for an object or class that is no observer: it has none of the methods, or an ``on_``
    method that nothing would call."""
    value = getattr(observer, "__qualname__", type(observer).__qualname__)
    hooks = [word for word in dir(observer) if word.startswith("on_")]
    hint = f"an observer has some of {', '.join(METHODS)} (docs/extend.md)"
    if hooks == []:
        raise ConfigError(key, value, f"is no observer: {hint}")
    for word in hooks:
        if word not in METHODS:
            raise ConfigError(key, value, f"nothing calls its {word}; {hint}")


def _create(key: str, tree: Mapping[str, Any]) -> Any:
    make: Callable[..., Any] = import_function(f"{key}._target_", tree["_target_"])
    try:
        with _keeping_random_states():
            observer = make(**{word: value for word, value in tree.items() if word != "_target_"})
    except UserError:
        raise
    except Exception as error:
        raise ConfigError(key, tree["_target_"], f"could not be made: {_where(error)}") from error
    check_observer(f"{key}._target_", observer)
    return observer


def _where(error: Exception) -> str:
    """Return file, line and message of an error, located in the observer's code."""
    frames = traceback.extract_tb(error.__traceback__)[1:]  # the first frame is the call in this module
    at = f"{frames[0].filename}, line {frames[0].lineno}: " if frames else ""
    text = " ".join(str(error).split())
    return scrub_text(f"{at}{type(error).__name__}{f': {text}' if text else ''}")


@contextmanager
def _keeping_random_states() -> Iterator[None]:
    """Restore the run's random states afterwards, so that an observer's random draws do not change them."""
    ours = (torch.get_rng_state(), random.getstate(), np.random.get_state())
    try:
        yield
    finally:
        torch.set_rng_state(ours[0])
        random.setstate(ours[1])
        np.random.set_state(ours[2])
