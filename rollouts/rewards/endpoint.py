"""Asking an HTTP endpoint many times at once: it may fail now and then, or be given up."""

from __future__ import annotations

import json
import os
import random
import threading
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import httpx2

from common.errors import ConfigError
from common.http_client import TooLongError, WholeExchange, check_endpoint
from rollouts.rewards.base import Missing, RewardError
from rollouts.rewards.early import Tasks

T = TypeVar("T")
V = TypeVar("V")

LONGEST_WAIT_S = 60.0
"""Between two tries, whatever the endpoint asks for."""

_STOP = {301, 302, 307, 308, 401, 403, 404, 405}
"""HTTP errors that every further call would get too: a wrong key, address or model."""


class FailedError(Exception):
    """One call without a result. ``again``: whether another try may have one; ``wait``: seconds that the
    endpoint asked to wait; ``endpoint``: whether it speaks against the endpoint, rather than against what was
    asked."""

    def __init__(self, reason: str, again: bool, wait: float = 0.0, endpoint: bool | None = None) -> None:
        super().__init__(reason)
        self.again, self.wait = again, wait
        self.endpoint = again if endpoint is None else endpoint


class EndpointSettings(Protocol):
    """The part of a reward's settings that says how it is asked (config.schema_rewards)."""

    api_key_env: str | None
    concurrency: int
    timeout: float
    retries: int
    backoff: float


class Endpoint:
    """One address that is asked by POST with JSON, and answers with JSON. An endpoint that fails now and then
    is asked again; one that does nothing else is given up."""

    def __init__(
        self, section: str, base_url: str, path: str, settings: EndpointSettings, most_bytes: int
    ) -> None:
        """``section``: of the settings, as in ``reward.judge``; ``path`` is added to ``base_url``;
        ``most_bytes``: of a reply. Raises ConfigError for an address or a key that cannot be sent."""
        self.section, self.base_url, self.settings = section, base_url, settings
        name = settings.api_key_env
        self._key = os.environ[name].strip() if name is not None else None
        check_endpoint(section, base_url, name, self._key)
        self._url = base_url.rstrip("/") + path
        self._client = httpx2.Client(transport=WholeExchange(settings.timeout, most_bytes), timeout=None)
        self._lock = threading.Lock()
        self._failures_in_a_row = 0
        self._made: list[Tasks[Any, Any]] = []
        self._closed = threading.Event()
        self._dead_after = max(50, 5 * settings.concurrency)

    def calls(self, ask: Callable[[T], V]) -> Tasks[T, V | Missing]:
        """``ask`` of items, at most ``concurrency`` at once: its result, or why there is none. ``ask`` calls
        ``post`` and raises FailedError. ``map`` raises RewardError where every further call would fail too: a
        wrong key, address or model."""
        made: Tasks[T, V | Missing] = Tasks(
            lambda item: self._tried(ask, item), self.settings.concurrency, self._anew
        )
        self._made.append(made)
        return made

    def _anew(self) -> None:
        self._failures_in_a_row = 0

    def post(self, body: bytes) -> Any:
        """What the endpoint answers to ``body``. Raises FailedError, RewardError."""
        headers = {"Content-Type": "application/json"} | (
            {"Authorization": f"Bearer {self._key}"} if self._key else {}
        )
        try:
            response = self._client.post(self._url, content=body, headers=headers)
        except httpx2.TimeoutException:
            reason = f"the endpoint did not answer within {self.settings.timeout:g} s"
            raise FailedError(reason, again=True) from None
        except httpx2.HTTPError as error:
            raise FailedError(f"the endpoint did not answer ({_kind(error)})", again=True) from None
        if not response.is_success:
            raise self._refused(response)
        try:
            return json.loads(response.content)
        except (ValueError, RecursionError):
            raise FailedError("the endpoint's reply is no JSON", again=True) from None

    def check(self, ask: Callable[[T], Any], item: T) -> None:
        """Ask once, before anything else is done. Raises ConfigError where there is no answer."""
        key = f"{self.section}.base_url"
        try:
            ask(item)
        except FailedError as failed:
            raise ConfigError(key, self.base_url, f"does not answer as it must: {failed}") from None
        except RewardError as refused:
            said = str(refused).removeprefix(f"{key}={self.base_url} ")
            raise ConfigError(key, self.base_url, said) from None

    def close(self) -> None:
        """What is under way ends with its try."""
        self._closed.set()
        for made in self._made:
            made.close()
        self._client.close()

    def _tried(self, ask: Callable[[T], V], item: T) -> V | Missing:
        for attempt in range(self.settings.retries + 1):
            if self._closed.is_set():
                return Missing("the endpoint was let go of")
            if self._failures_in_a_row >= self._dead_after:
                return Missing(f"the endpoint was given up after {self._dead_after} failures in a row")
            try:
                result = ask(item)
            except FailedError as failed:
                with self._lock:
                    self._failures_in_a_row += failed.endpoint
                if not failed.again or attempt == self.settings.retries:
                    return Missing(str(failed))
                pause = max(failed.wait, self.settings.backoff * 2**attempt * random.uniform(0.5, 1.5))
                self._closed.wait(min(pause, LONGEST_WAIT_S))
            else:
                self._failures_in_a_row = 0
                return result
        raise AssertionError("the last attempt returns")

    def _refused(self, response: httpx2.Response) -> FailedError | RewardError:
        """What an HTTP error means for this call, or for all of them. What the endpoint says may repeat the
        key: it is cut out."""
        code, said = response.status_code, response.content[:2000].decode(errors="replace")
        if self._key:
            said = said.replace(self._key, "***")
        if code in _STOP:
            model = getattr(self.settings, "model", None)
            asked = f"model={model}" if model else "the call"
            return RewardError(
                f"{self.section}.base_url={self.base_url} refuses {asked}: "
                f"HTTP {code} {said[:300]}; mend the address, the model or the key"
            )
        again = code in (408, 409, 425, 429) or code >= 500
        return FailedError(
            f"HTTP {code} from the endpoint", again, _seconds(response.headers.get("Retry-After"))
        )


def _kind(error: httpx2.HTTPError) -> str:
    """The error's class; its words may be the endpoint's, and different at each call."""
    return str(error) if isinstance(error, TooLongError) else type(error).__name__


def _seconds(text: str | None) -> float:
    """Retry-After in seconds; 0 where there is none, or a date."""
    try:
        return max(0.0, float(text or 0))
    except ValueError:
        return 0.0
