"""Requests over HTTP to what runs elsewhere: a judge or a reward server."""

from __future__ import annotations

import asyncio
import json
import os
import random
import threading
import urllib.request
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import wait
from typing import Any, TypeVar

import aiohttp
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, stop_after_attempt
from yarl import URL

from common.errors import ConfigError, require
from rollouts.rewards.base import Missing, RewardError, results
from rollouts.rewards.settings import HttpConfig, JudgeConfig

T = TypeVar("T")
V = TypeVar("V")

KEEP_ALIVE_S = 4.0
"""Seconds that an idle connection is kept for the next request: less than any server keeps it."""
LONGEST_WAIT_S = 60.0
"""Longest wait between two tries in seconds, whatever the endpoint asks for."""
_CLOSE_S = 5.0
_STOP = {401, 402, 403, 404, 405, 407, 410}
"""HTTP status codes that every further call would get too, because of a wrong key, address or model. So are
all redirections."""


class ReplyError(aiohttp.ClientError):
    """A reply that is not read on: it has more bytes than the limit, or is compressed."""


def check_endpoint(section: str, base_url: str, api_key_env: str | None, key: str | None) -> None:
    """Raise ConfigError if ``base_url`` is not an address, or if ``key`` has characters that an HTTP header
    cannot hold. The message does not show ``key``.

    ``section`` is the section of the settings, for example ``reward.judge``; ``api_key_env`` is the
    environment variable that ``key`` comes from.
    """
    try:
        host = URL(base_url).host
    except ValueError as error:
        raise ConfigError(f"{section}.base_url", base_url, f"is no address ({error})") from error
    require(bool(host), f"{section}.base_url", base_url, "names no host")
    require(
        not key or (key.isascii() and key.isprintable()),
        f"{section}.api_key_env",
        api_key_env,
        "is an environment variable whose value has characters that no key has (a line break, an accent): "
        "set it again",
    )


class FailedError(Exception):
    """One call without a result. ``again``: whether another try may succeed. ``wait``: seconds that the
    endpoint asked to wait. ``endpoint``: whether the failure counts against the endpoint rather than against
    the request; None: the value of ``again``."""

    def __init__(self, reason: str, again: bool, wait: float = 0.0, endpoint: bool | None = None) -> None:
        super().__init__(reason)
        self.again, self.wait = again, wait
        self.endpoint = again if endpoint is None else endpoint


class Endpoint:
    """One address that takes JSON by POST and answers with JSON. An endpoint that fails now and then is asked
    again; an endpoint that only fails is given up.

    Requests are made in an event loop in a thread of its own. A time limit of each read would not end an
    exchange with a server that sends a byte now and then, or ``100 Continue`` for ever. Here the limit is of
    the whole exchange, from the first attempt to connect to the last byte. Replies are uncompressed, because
    a few compressed bytes may unpack to gigabytes, and redirections are not followed. Proxies come from the
    environment.
    """

    def __init__(
        self, section: str, base_url: str, path: str, settings: JudgeConfig | HttpConfig, most_bytes: int
    ) -> None:
        """``section``: the section of the settings, such as ``reward.judge``. ``path`` is appended to
        ``base_url``. ``most_bytes``: the largest reply accepted. Raises ConfigError for an address or a key
        that cannot be sent."""
        self.section, self.base_url, self.settings = section, base_url, settings
        name = settings.api_key_env
        self._key = os.environ[name].strip() if name is not None else None
        check_endpoint(section, base_url, name, self._key)
        self._headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if self._key:
            self._headers["Authorization"] = f"Bearer {self._key}"
        self._url, self._most_bytes = base_url.rstrip("/") + path, most_bytes
        self._proxy = proxy_of(base_url)
        self._session: aiohttp.ClientSession | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="http", daemon=True)
        self._thread.start()
        self._room = asyncio.Semaphore(settings.concurrency)
        self._failures_in_a_row = 0
        self._dead_after = max(50, 5 * settings.concurrency)
        self._tried = AsyncRetrying(
            retry=retry_if_exception(lambda error: isinstance(error, FailedError) and error.again),
            stop=stop_after_attempt(settings.retries + 1),
            wait=self._pause,
            reraise=True,
        ).wraps(self._once)

    def map(self, ask: Callable[[T], Awaitable[V]], items: Iterable[T]) -> list[V | Missing]:
        """Apply ``ask`` to items, at most ``concurrency`` at once. Each result is that of ``ask``, or the
        reason why there is none. ``ask`` awaits ``post`` and raises FailedError. Raises RewardError if every
        further call would fail too, because of a wrong key, address or model."""
        self._failures_in_a_row = 0
        work = [self._one(ask, item) for item in items]
        return results([asyncio.run_coroutine_threadsafe(one, self._loop) for one in work])

    async def _one(self, ask: Callable[[T], Awaitable[V]], item: T) -> V | Missing:
        async with self._room:
            try:
                result: V = await self._tried(ask, item)
                return result
            except FailedError as failed:
                return Missing(str(failed))

    async def _once(self, ask: Callable[[T], Awaitable[V]], item: T) -> V:
        if self._failures_in_a_row >= self._dead_after:
            reason = f"the endpoint was given up after {self._dead_after} failures in a row"
            raise FailedError(reason, again=False)
        try:
            result = await ask(item)
        except FailedError as failed:
            self._failures_in_a_row += failed.endpoint
            raise
        self._failures_in_a_row = 0
        return result

    def _pause(self, state: RetryCallState) -> float:
        """Return the seconds to wait before the next try."""
        failed = state.outcome.exception() if state.outcome else None
        doubled = self.settings.backoff * 2.0 ** min(state.attempt_number - 1, 64)
        requested = failed.wait if isinstance(failed, FailedError) else 0.0
        return min(max(requested, doubled * random.uniform(0.5, 1.5)), LONGEST_WAIT_S)

    async def post(self, body: bytes) -> Any:
        """Return the endpoint's JSON answer to ``body``. Raises FailedError, RewardError."""
        try:
            response, content = await self._exchange(body)
        except TimeoutError:
            reason = f"the endpoint did not answer within {self.settings.timeout:g} s"
            raise FailedError(reason, again=True) from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            # not an error's own message, which may be the endpoint's and different at each call
            kind = str(error) if isinstance(error, ReplyError) else type(error).__name__
            raise FailedError(f"the endpoint did not answer ({kind})", again=True) from None
        if not 200 <= response.status < 300:
            raise self._refused(response, content)
        try:
            return json.loads(content)
        except (ValueError, RecursionError):
            raise FailedError("the endpoint's reply is no JSON", again=True) from None

    async def _exchange(self, body: bytes) -> tuple[aiohttp.ClientResponse, bytes]:
        """Return the response to ``body``, whole. Raises TimeoutError, aiohttp.ClientError (ReplyError),
        OSError, ValueError."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
                timeout=aiohttp.ClientTimeout(total=self.settings.timeout),
                headers=self._headers,
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
            )
        sent = self._session.post(self._url, data=body, allow_redirects=False, proxy=self._proxy)
        async with sent as response:
            if response.headers.get("Content-Encoding", "identity").lower() != "identity":
                raise ReplyError("the reply is compressed, which was not asked for")
            received = bytearray()
            async for part in response.content.iter_any():
                received += part
                if len(received) > self._most_bytes:
                    raise ReplyError(f"the reply is longer than {self._most_bytes} bytes")
            return response, bytes(received)

    def check(self, ask: Callable[[T], Awaitable[Any]], item: T) -> None:
        """Make one call before anything else is done. Raises ConfigError if there is no answer."""

        async def one_call() -> None:
            await ask(item)

        key = f"{self.section}.base_url"
        try:
            asyncio.run_coroutine_threadsafe(one_call(), self._loop).result()
        except (FailedError, RewardError) as error:
            self.close()
            failed = "does not answer as it must: " if isinstance(error, FailedError) else ""
            reason = failed + str(error).removeprefix(f"{key}={self.base_url} ")
            raise ConfigError(key, self.base_url, reason) from None

    def close(self) -> None:
        """Cancel the calls, close the connections and end the thread. Nothing can be asked afterwards."""
        if self._loop.is_closed():
            return
        ended = asyncio.run_coroutine_threadsafe(self._end(), self._loop)
        wait([ended], _CLOSE_S)  # a loop that is busy with what a reply says ends with the process
        if ended.done():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    async def _end(self) -> None:
        under_way = asyncio.all_tasks() - {asyncio.current_task()}
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    def _refused(self, response: aiohttp.ClientResponse, content: bytes) -> FailedError | RewardError:
        """Return the error for an HTTP error status: a RewardError if it concerns all calls, else a
        FailedError. The endpoint's message may repeat the key, so the key is removed from it."""
        code, message = response.status, content[:2000].decode(errors="replace")
        if self._key:
            message = message.replace(self._key, "***")
        message = message[:300]
        if code in _STOP or 300 <= code < 400:
            model = getattr(self.settings, "model", None)
            subject = f"model={model}" if model else "the call"
            return RewardError(
                f"{self.section}.base_url={self.base_url} refuses {subject}: "
                f"HTTP {code} {message}; fix the address, the model or the key"
            )
        again = code in (408, 409, 425, 429) or code >= 500
        why = "" if again else f": {' '.join(message.split())}"  # its words differ from try to try
        wait = _seconds(response.headers.get("Retry-After"))
        return FailedError(f"HTTP {code} from the endpoint{why}", again, wait)


def proxy_of(base_url: str) -> str | None:
    """Return the address of the proxy for ``base_url`` in the environment (HTTP_PROXY, NO_PROXY, …)."""
    url, proxies = URL(base_url), urllib.request.getproxies()
    if urllib.request.proxy_bypass(f"{url.host}:{url.port}"):
        return None
    return proxies.get(url.scheme) or proxies.get("all")


def _seconds(text: str | None) -> float:
    """Return a Retry-After header in seconds; 0 if it is absent or a date."""
    try:
        return max(0.0, float(text or 0))
    except ValueError:
        return 0.0
