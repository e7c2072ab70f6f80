"""A port that a program will listen on later is not given to somebody else before."""

from __future__ import annotations

import socket

from common import ports


def test_no_outgoing_connection_is_given_a_free_port():
    outgoing = ports.outgoing_ports()
    with socket.create_server(("127.0.0.1", 0)) as found:
        assert found.getsockname()[1] in outgoing, "the kernel's own choice comes from that range"
    drawn = [ports.free_port() for _ in range(200)]
    assert not any(port in outgoing for port in drawn)
    assert len(set(drawn)) > 190, "programs that ask at once get ports of their own"


def test_a_port_that_is_listened_on_is_not_free(monkeypatch):
    with socket.create_server(("127.0.0.1", ports.free_port())) as taken:
        busy = taken.getsockname()[1]
        monkeypatch.setattr(ports, "outgoing_ports", lambda: frozenset(range(65_536)) - {busy})
        assert ports.free_port() not in (busy, 0)  # the only one that is left is taken
