"""Limits of a whole exchange, over real sockets. What endpoints do to judges is in the tests of those."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError

import aiohttp
import pytest

from common.errors import ConfigError
from rollouts.rewards.endpoint import Client, Reply, ReplyError, check_endpoint


@pytest.fixture
def silent() -> Iterator[str]:
    """An address that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def answering() -> Iterator[str]:
    """An address that answers every request with 1,000 bytes and closes."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(65536)
                    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n" + b"x" * 1000)

        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)


def get(url: str, timeout: float, most: int) -> Reply:
    client = Client(url, timeout, most)
    try:
        return client.submit(client.post(url, b"y" * 100)).result()
    finally:
        client.close()


def test_the_limits_are_of_seconds_and_of_bytes(silent, answering):
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        get(silent, 0.3, 999)
    assert time.monotonic() - began < 20
    assert len(get(answering, 60, 1000).content) == 1000
    with pytest.raises(ReplyError, match="longer than 999 bytes"):
        get(answering, 60, 999)


def test_closing_ends_what_is_under_way_and_leaves_nothing(silent):
    """And nothing that is asked of a closed client waits."""
    before = threading.active_count()
    client = Client(silent, 60, 1000)
    asked = client.submit(client.post(silent, b""))
    time.sleep(0.1)
    client.close()
    client.close()
    for future in (asked, client.submit(client.post(silent, b""))):
        with pytest.raises(CancelledError):
            future.result(5)
    assert threading.active_count() <= before


def test_a_proxy_comes_from_the_environment(answering, monkeypatch):
    monkeypatch.setenv("http_proxy", answering)
    monkeypatch.setenv("no_proxy", "elsewhere.invalid:1")
    assert len(get("http://no.such.host.invalid", 60, 1000).content) == 1000
    with pytest.raises(aiohttp.ClientConnectionError):
        get("http://elsewhere.invalid:1", 60, 1000)


@pytest.mark.parametrize(
    ("url", "key", "setting"),
    [
        ("http://", "k", "s.base_url"),
        ("http://h:port", "k", "s.base_url"),
        ("http://h", "é", "s.api_key_env"),
    ],
)
def test_an_endpoint_that_cannot_be_asked_is_refused(url, key, setting):
    check_endpoint("s", "http://h/v1", None, None)
    with pytest.raises(ConfigError) as error:
        check_endpoint("s", url, "VARIABLE", key)
    assert error.value.key == setting and "é" not in str(error.value)
