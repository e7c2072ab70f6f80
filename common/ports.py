"""Find a TCP port that a program can listen on some seconds later.

The port that ``bind`` finds for the number 0 is one of those that Linux also gives to outgoing connections. A
program that needs a minute to listen there, as a vLLM server does, may find that it was given away. The ports
outside of that range go only to programs that ask for them by number.
"""

import random
import socket
from pathlib import Path

RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
LOWEST = 10_000  # well-known services listen below
TRIES = 1000


def outgoing_ports() -> range:
    """Return the ports that the kernel gives to outgoing connections."""
    try:
        first, last = map(int, RANGE.read_text().split())
    except (OSError, ValueError):
        first, last = 32_768, 60_999  # Linux's default
    return range(first, last + 1)


def free_port() -> int:
    """Return a port that nothing listens on at present, drawn from those that outgoing connections do not use
    (where those leave none: any port). Of two programs that ask at once, both may get the same, once in
    thousands."""
    outgoing = outgoing_ports()
    others = [port for port in range(LOWEST, 65_536) if port not in outgoing]
    drawn = random.SystemRandom().sample(others, min(TRIES, len(others)))  # leaves the seeded generator alone
    for port in [*drawn, 0]:
        with socket.socket() as tried:
            try:
                tried.bind(("", port))
            except OSError:
                continue
            return int(tried.getsockname()[1])
    raise OSError("every port of this machine is taken")
