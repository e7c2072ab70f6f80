"""Limits of a whole exchange, over real sockets. What endpoints do to judges is in the tests of those."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import httpx2
import pytest

from common.errors import ConfigError
from common.http_client import TooLongError, WholeExchange, check_endpoint


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


def test_the_limits_are_of_seconds_and_of_bytes(silent, answering):
    began = time.monotonic()
    with (
        httpx2.Client(transport=WholeExchange(0.3, 999), timeout=None) as client,
        pytest.raises(httpx2.ReadTimeout, match=r"longer than 0\.3 s"),
    ):
        client.get(silent)
    assert time.monotonic() - began < 20
    with httpx2.Client(transport=WholeExchange(60, 1000), timeout=None) as client:
        assert len(client.post(answering, content=b"y" * 100).content) == 1000
    with (
        httpx2.Client(transport=WholeExchange(60, 999), timeout=None) as client,
        pytest.raises(TooLongError, match="longer than 999 bytes"),
    ):
        client.get(answering)


def test_nothing_is_left_after_closing(answering):
    before = threading.active_count()
    transport = WholeExchange(60, 1000)
    with httpx2.Client(transport=transport, timeout=None) as client:
        client.get(answering)
    transport.close()  # a second time
    assert threading.active_count() <= before


def test_a_refused_connection_is_an_error_of_the_clients():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with httpx2.Client(transport=WholeExchange(60, 1000)) as client, pytest.raises(httpx2.ConnectError):
        client.get(f"http://127.0.0.1:{port}")


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
