"""A port that a program will listen on later is not given to somebody else before."""

from __future__ import annotations

import socket

from common import ports


def test_a_free_port_is_none_of_outgoing_connections_and_none_that_is_listened_on(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as found:
        assert found.getsockname()[1] not in ports.PORTS, "the kernel's own choice"
    drawn = {ports.free_port() for _ in range(200)}
    assert drawn <= {*ports.PORTS} and len(drawn) > 190, "programs that ask at once get ports of their own"
    with socket.create_server(("127.0.0.1", busy := drawn.pop())):
        monkeypatch.setattr(ports, "PORTS", range(busy, busy + 2))
        assert {ports.free_port() for _ in range(20)} == {busy + 1}
