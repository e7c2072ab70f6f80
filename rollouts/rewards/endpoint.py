"""Concurrent requests to an HTTP endpoint that may fail now and then, and that is given up if it only
fails."""

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
"""Longest wait between two tries in seconds, whatever the endpoint asks for."""

_STOP = {301, 302, 307, 308, 401, 403, 404, 405}
"""HTTP status codes that every further call would get too, because of a wrong key, address or model."""


class FailedError(Exception):
    """One call without a result. ``again``: whether another try may succeed. ``wait``: seconds that the
    endpoint asked to wait. ``endpoint``: whether the failure counts against the endpoint rather than against
    the request; None: the value of ``again``."""

    def __init__(self, reason: str, again: bool, wait: float = 0.0, endpoint: bool | None = None) -> None:
        super().__init__(reason)
        self.again, self.wait = again, wait
        self.endpoint = again if endpoint is None else endpoint


class EndpointSettings(Protocol):
    """The part of a reward's settings that controls its requests (config.schema_rewards)."""

    api_key_env: str | None
    concurrency: int
    timeout: float
    retries: int
    backoff: float


class Endpoint:
    """One address that takes JSON by POST and answers with JSON. An endpoint that fails now and then is asked
    again; an endpoint that only fails is given up."""

    def __init__(
        self, section: str, base_url: str, path: str, settings: EndpointSettings, most_bytes: int
    ) -> None:
        """``section``: the section of the settings, such as ``reward.judge``. ``path`` is appended to
        ``base_url``. ``most_bytes``: the largest reply accepted. Raises ConfigError for an address or a key
        that cannot be sent."""
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
        """Return tasks that apply ``ask`` to items, at most ``concurrency`` at once. The result is that of
        ``ask``, or the reason why there is none. ``ask`` calls ``post`` and raises FailedError. ``map``
        raises RewardError if every further call would fail too, because of a wrong key, address or model."""
        made: Tasks[T, V | Missing] = Tasks(
            lambda item: self._tried(ask, item), self.settings.concurrency, self._anew
        )
        self._made.append(made)
        return made

    def _anew(self) -> None:
        self._failures_in_a_row = 0

    def post(self, body: bytes) -> Any:
        """Return the endpoint's JSON answer to ``body``. Raises FailedError, RewardError."""
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
        """Make one call before anything else is done. Raises ConfigError if there is no answer."""
        key = f"{self.section}.base_url"
        try:
            ask(item)
        except FailedError as failed:
            raise ConfigError(key, self.base_url, f"does not answer as it must: {failed}") from None
        except RewardError as refused:
            said = str(refused).removeprefix(f"{key}={self.base_url} ")
            raise ConfigError(key, self.base_url, said) from None

    def close(self) -> None:
        """Cancel the calls that have not begun and close the client. A call under way is not tried again."""
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
        """Return the error for an HTTP error status: a RewardError if it concerns all calls, else a
        FailedError. The endpoint's message may repeat the key, so the key is removed from it."""
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
    """Return the name of the error's class, because its message may be the endpoint's and different at each
    call. A TooLongError gives its own message."""
    return str(error) if isinstance(error, TooLongError) else type(error).__name__


def _seconds(text: str | None) -> float:
    """Return a Retry-After header in seconds; 0 if it is absent or a date."""
    try:
        return max(0.0, float(text or 0))
    except ValueError:
        return 0.0
