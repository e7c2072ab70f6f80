"""HTTP transport with limits on a whole exchange: the seconds from the first attempt to connect to the last
byte of the reply, and the number of bytes.

An HTTP client's own time limit applies to each read. An endpoint that sends one byte of its headers now and
then, or ``100 Continue`` for ever, never exceeds it. Here the exchange runs in an event loop, which cancels
it when its time is up, at whatever stage it is.
"""

from __future__ import annotations

import asyncio
import threading

import httpx2

from common.errors import ConfigError, require


def check_endpoint(section: str, base_url: str, api_key_env: str | None, key: str | None) -> None:
    """Raise ConfigError if ``base_url`` is not an address, or if ``key`` has characters that an HTTP header
    cannot hold. The message does not show ``key``.

    ``section`` is the section of the settings, for example ``reward.judge``; ``api_key_env`` is the
    environment variable that ``key`` comes from.
    """
    try:
        host = httpx2.URL(base_url).host
    except (httpx2.InvalidURL, ValueError) as error:
        raise ConfigError(f"{section}.base_url", base_url, f"is no address ({error})") from error
    require(bool(host), f"{section}.base_url", base_url, "names no host")
    require(
        not key or (key.isascii() and key.isprintable()),
        f"{section}.api_key_env",
        api_key_env,
        "is an environment variable whose value has characters that no key has (a line break, an accent): "
        "set it again",
    )


class TooLongError(httpx2.RemoteProtocolError):
    """A reply with more bytes than the limit."""


class WholeExchange(httpx2.BaseTransport):
    """A transport for ``httpx2.Client(transport=…)`` that any number of threads may use. It takes proxies
    from the environment. It does not follow redirects, but the client may.

    Raises httpx2.ReadTimeout when an exchange took longer than ``timeout`` seconds, TooLongError for a reply
    of more than ``most_bytes`` and httpx2.DecodingError for a compressed reply, as well as the client's own
    errors. The transport asks for uncompressed replies, because a few compressed bytes may unpack to
    gigabytes.
    """

    def __init__(self, timeout: float, most_bytes: int) -> None:
        self.timeout, self.most_bytes = timeout, most_bytes
        self._client = httpx2.AsyncClient(timeout=None, limits=httpx2.Limits(max_connections=None))
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="http", daemon=True)
        self._thread.start()

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        """Send ``request`` and return the whole reply."""
        return asyncio.run_coroutine_threadsafe(self._exchange(request, request.read()), self._loop).result()

    def close(self) -> None:
        """Close the connections and end the thread."""
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(self._client.aclose(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _exchange(self, request: httpx2.Request, body: bytes) -> httpx2.Response:
        ours = self._client.build_request(request.method, request.url, headers=request.headers, content=body)
        ours.headers["Accept-Encoding"] = "identity"
        try:
            async with asyncio.timeout(self.timeout):
                response = await self._client.send(ours, stream=True)
                try:
                    received = await self._received(response)
                finally:
                    await response.aclose()
        except TimeoutError:
            raise httpx2.ReadTimeout(f"took longer than {self.timeout:g} s", request=request) from None
        return httpx2.Response(
            response.status_code, headers=response.headers, content=received, request=request
        )

    async def _received(self, response: httpx2.Response) -> bytes:
        if response.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise httpx2.DecodingError(
                "the reply is compressed, which was not asked for", request=response.request
            )
        received = bytearray()
        async for part in response.aiter_raw():
            received += part
            if len(received) > self.most_bytes:
                raise TooLongError(
                    f"the reply is longer than {self.most_bytes} bytes", request=response.request
                )
        return bytes(received)
