"""The one error of a setting that cannot be honoured, and how it is raised. What the parts of the schema share."""

from __future__ import annotations

from typing import Any


class ConfigError(ValueError):
    """A setting that cannot be honoured. ``str()`` is the one message a user sees: key, value, remedy."""

    def __init__(self, key: str, value: Any, remedy: str) -> None:
        super().__init__(f"{key}={value}: {remedy}")
        self.key, self.value, self.remedy = key, value, remedy

    def __reduce__(self) -> tuple[type[ConfigError], tuple[str, Any, str]]:
        return type(self), (self.key, self.value, self.remedy)  # it goes from rank 0 to the others


class StoppedError(RuntimeError):
    """A run that cannot go on; the message says why and what to do."""


def require(condition: bool, key: str, value: Any, remedy: str) -> None:
    """Raise ConfigError(key, value, remedy) unless ``condition``."""
    if not condition:
        raise ConfigError(key, value, remedy)


def one_of(key: str, value: Any, allowed: tuple[Any, ...]) -> None:
    require(value in allowed, key, value, f"use one of {', '.join(str(a) for a in allowed)}")


def variant(online: bool, humanline: bool, sync_mode: str | None) -> str:
    """One of the paper's four, offline, online, offline+humanline, online+humanline; trust-region syncing is said beside it."""
    return (
        ("online" if online else "offline")
        + "+humanline" * humanline
        + "+trust-region" * (sync_mode == "trust_region")
    )
