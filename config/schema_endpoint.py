"""Settings of an endpoint that is called over HTTP: address, key, number and duration of calls, retries."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass

from common.errors import require
from common.secrets import remember


@dataclass
class EndpointConfig(ABC):
    """Settings that every endpoint needs beside its address. ``timeout`` and ``backoff`` are in seconds."""

    api_key_env: str | None
    concurrency: int
    timeout: float
    retries: int
    backoff: float

    def __post_init__(self) -> None:
        section = self.section()
        require(
            self.api_key_env is None or self.api_key_env in os.environ,
            f"{section}.api_key_env",
            self.api_key_env,
            "is the name of the environment variable that holds the endpoint's key (never the key itself), "
            "and is not set; "
            "set that variable, or give null for no key",
        )
        remember(os.environ.get(self.api_key_env or ""), "api_key")
        require(
            self.timeout > 0,
            f"{section}.timeout",
            self.timeout,
            "is seconds a call may take: must be above 0",
        )
        require(
            self.backoff > 0,
            f"{section}.backoff",
            self.backoff,
            "is seconds before the first retry: must be above 0",
        )
        for key, least in (("concurrency", 1), ("retries", 0)):
            require(
                getattr(self, key) >= least,
                f"{section}.{key}",
                getattr(self, key),
                f"must be at least {least}",
            )

    @abstractmethod
    def section(self) -> str:
        """Return the name of the section of these settings, for example ``reward.judge``."""


def check_address(key: str, value: str, what: str) -> None:
    """Raise ConfigError unless ``value`` starts with http:// or https://."""
    require(
        value.startswith(("http://", "https://")), key, value, f"{what}: must start with http:// or https://"
    )
