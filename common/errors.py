"""Errors that a user can correct. Each message says what is wrong and what to do; programs print it without a
traceback."""

from __future__ import annotations

from typing import Any

from common.secrets import REMOVED, is_secret


class UserError(Exception):
    """An error that ends a program with one message instead of a traceback (``config.cli.guarded``)."""


class ConfigError(UserError, ValueError):
    """A setting that the program cannot honour. ``str()`` is the one message that the user sees: the key, its
    value (unless it is a secret) and the remedy."""

    def __init__(self, key: str, value: Any, remedy: str) -> None:
        super().__init__(f"{key}={REMOVED if is_secret(key, value) else value}: {remedy}")
        self.key, self.value, self.remedy = key, value, remedy

    def __reduce__(self) -> tuple[type[ConfigError], tuple[str, Any, str]]:
        return type(self), (self.key, self.value, self.remedy)  # pickled: rank 0 sends it to the other ranks


class DataError(UserError, ValueError):
    """A data file or row that cannot be used. The message names the file, the row and the remedy."""


class StoppedError(UserError, RuntimeError):
    """A run that cannot continue. The message says why and what to do."""


def require(condition: bool, key: str, value: Any, remedy: str) -> None:
    """Raise ConfigError(key, value, remedy) unless ``condition``."""
    if not condition:
        raise ConfigError(key, value, remedy)


def one_of(key: str, value: Any, allowed: tuple[Any, ...]) -> None:
    """Raise ConfigError unless ``value`` is one of ``allowed``."""
    if value not in allowed:
        raise ConfigError(key, value, f"use one of {', '.join(str(a) for a in allowed)}")


REQUEUE = 75
"""Exit code of a run that was asked to stop and lost nothing (EX_TEMPFAIL): run the same command again with
resume=true."""


class Requeue(SystemExit):
    """Raised to exit a run that was interrupted by a signal, after saving it."""

    def __init__(self, code: int = REQUEUE) -> None:
        super().__init__(code)  # other ranks get it pickled, with the code as its argument
